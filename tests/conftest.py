"""Settings of all tests."""

import torch

# Tests run in several processes side by side, on small tensors: threads would only wait for each other. And runs that
# are compared bit for bit must be computed alike.
torch.set_num_threads(1)
