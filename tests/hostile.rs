//! Guests that mean harm, against the real VMM: no Linux, but a few hundred bytes of machine code
//! that do what a script says (`hostile/code.rs`) and drive registers, rings, PCI and ports as no
//! driver would.
//!
//! These run on every KVM, natively, be it one that interprets its guests. After each ordeal the
//! guest asks the entropy device for random bytes and looks at them, says "good" and powers off; one
//! that finds something wrong says "bad" with the number of the record, and resets, which is another
//! exit code. The process may grow, and write, only so much.
//!
//! Numbers are those of the project's list of hostile stimuli.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests fail by panics")]

#[path = "hostile/code.rs"]
mod code;
#[path = "hostile/driver.rs"]
mod driver;
#[path = "hostile/endings.rs"]
mod endings;
#[path = "hostile/machine.rs"]
mod machine;
#[path = "hostile/pci.rs"]
mod pci;
#[path = "hostile/random.rs"]
mod random;
#[path = "hostile/registers.rs"]
mod registers;
#[path = "hostile/rings.rs"]
mod rings;
#[path = "hostile/script.rs"]
mod script;

use machine::Kind;
use script::Script;

/// Runs a script over either transport, with a look at the rest of the machine at its end.
fn on_both(body: impl Fn(&mut Script, Kind)) {
    for kind in [Kind::Mmio, Kind::Pci] {
        let mut script = Script::new();
        for device in machine::devices(kind) {
            device.meet(&mut script);
        }
        body(&mut script, kind);
        driver::still_works(&mut script, kind);
        machine::run_well(kind, &mut script);
    }
}
