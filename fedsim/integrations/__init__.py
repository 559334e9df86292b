"""fedsim's rules and partitions in other packages; each module needs the package that it is named after."""
