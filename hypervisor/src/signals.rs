//! Signals as events: blocked in every thread, taken by one that waits for them.

use nix::sys::signal::{SigSet, Signal};

use crate::event::{Event, Events};

/// The signals that end a VM, or concern its terminal.
const TAKEN: [Signal; 5] =
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGWINCH];

fn taken() -> SigSet {
    TAKEN.into_iter().collect()
}

/// Blocks the signals. Call it in `main` before the first thread is made, so that all inherit it.
pub fn block() -> Result<(), nix::Error> {
    taken().thread_block()
}

/// Lets the signals act again, in a process that only waits for another.
pub fn unblock() -> Result<(), nix::Error> {
    taken().thread_unblock()
}

/// Starts the thread that turns them into events.
pub fn watch(events: Events) -> std::io::Result<()> {
    let wait = move || {
        while let Ok(signal) = taken().wait() {
            if !events.send(Event::Signal(signal as i32)) {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".to_owned()).stack_size(64 * 1024);
    thread.spawn(wait).map(drop)
}
