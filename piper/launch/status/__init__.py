"""What other processes of this user can see of running workers."""
