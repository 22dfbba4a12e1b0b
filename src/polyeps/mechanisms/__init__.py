"""Mechanisms that clip and add noise; each module holds a mechanism's law, its sampler and its price."""
