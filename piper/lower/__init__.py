"""From a placed and ordered DAG to one checked plan for each kind of device."""
