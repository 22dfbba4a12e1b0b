"""FedHDP's theory: closed forms, the printed equations beside those that hold, and simulations of both."""
