"""Start, route to, watch and talk to inference servers."""
