"""Local training of a whole cohort as one batched computation: layers, layouts, batches and noise streams."""
