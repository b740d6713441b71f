"""What a trace says: how much faster would the job be, were all alike, and who holds it up?"""
