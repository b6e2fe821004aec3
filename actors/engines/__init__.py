"""Generation engines behind one interface. No Ray in here."""
