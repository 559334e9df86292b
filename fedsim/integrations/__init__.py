"""fedsim's aggregation rules and partitions in other packages: PyTorch DDP, Lightning, Flower and Flower Datasets.

The modules for Lightning, Flower and Flower Datasets need the package of the same name.
"""
