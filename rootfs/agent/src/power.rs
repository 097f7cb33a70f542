//! The end of the guest.

use guest_protocol::PowerOff;
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// A dead disk must not keep the guest alive.
const SYNC_TIMEOUT: Duration = Duration::from_secs(10);

/// Kills every process but this one and PID 1, and leaves the file systems whole, as far as that
/// is possible in time. Only in a guest that is about to end.
pub fn settle() {
    let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
    let (done, wait) = mpsc::channel();
    let syncing = thread::Builder::new().stack_size(64 << 10).spawn(move || {
        nix::unistd::sync();
        // Marks the root as clean. Refused as long as a file is open for writing: then its journal
        // will have to do.
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        let _ = mount(None::<&str>, "/", None::<&str>, flags, None::<&str>);
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
