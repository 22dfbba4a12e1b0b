"""Training a whole cohort as one batched computation: layers, layouts, batches and noise."""
