"""What `polyeps run` needs: the experiment as a file, its clients, their noise, and the run on disk."""
