//! What neither guests nor programs should do.
