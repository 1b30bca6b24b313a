"""What this machine really does, hop by hop, beside what the plan assumes."""
