"""FedHDP's theory (paper 003): closed forms, what the paper prints beside what holds, and simulations of both."""
