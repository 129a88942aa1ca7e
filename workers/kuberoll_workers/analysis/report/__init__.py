"""Looking at a run: every trajectory once, numbers over all of them, and one page of HTML that shows both."""
