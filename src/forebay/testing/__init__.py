"""What tests of Forebay, and of stores written for it, are made with."""
