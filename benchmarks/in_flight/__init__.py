"""The treatments of requests in flight during a push, against each other and against no pushes."""
