//! Maps shared CXL memory and hands it out as slabs.
