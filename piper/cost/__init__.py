"""How long a step takes on devices that need not be there: clusters, costs, simulation."""
