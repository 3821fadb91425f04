"""Work that can wait: files of requests, and batches of them, kept on disk until every line is answered."""
