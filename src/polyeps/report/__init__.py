"""Tables, pictures and one offline page about runs, made from their journals alone."""
