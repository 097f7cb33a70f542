//! CubeVMM's tests, which look in from outside: each is an explicit `[[test]]` target of this crate.
