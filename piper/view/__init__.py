"""Display the results of other packages. Nothing here changes how a program runs."""
