"""Lightning's internals (underscored names), which no other folder touches. Each is a row of the table of seams."""
