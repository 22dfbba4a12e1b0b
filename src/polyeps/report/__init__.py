"""What a run shows people: tables, pictures and one offline page, all made from journals alone."""
