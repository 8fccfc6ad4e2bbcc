"""What other packages made, shown to a person. Nothing here changes what is done."""
