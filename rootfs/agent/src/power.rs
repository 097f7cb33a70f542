//! The end of the guest.

use guest_protocol::PowerOff;
use nix::sys::reboot::{RebootMode, reboot};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// A dead disk must not keep the guest alive.
const SYNC_TIMEOUT: Duration = Duration::from_secs(10);

/// Writes back what the file systems hold, as far as that is possible in time.
pub fn sync() {
    let (done, wait) = mpsc::channel();
    let syncing = thread::Builder::new().stack_size(64 << 10).spawn(move || {
        nix::unistd::sync();
        let _ = done.send(());
    });
    if syncing.is_ok() {
        let _ = wait.recv_timeout(SYNC_TIMEOUT);
    }
}

/// Ends the guest at once.
pub fn off(how: PowerOff) -> ! {
    // Without ACPI the kernel cannot power off and would halt instead, which no VMM notices. The
    // reset it does know, through the keyboard controller, ends the VM just as well.
    let acpi = Path::new("/sys/firmware/acpi").exists();
    if how == PowerOff::Poweroff && acpi {
        let _ = reboot(RebootMode::RB_POWER_OFF);
    }
    let _ = reboot(RebootMode::RB_AUTOBOOT);
    // Only without the privilege, which PID 1 and its child have.
    loop {
        thread::park();
    }
}
