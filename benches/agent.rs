//! What a guest is asked: lines of shell, through the agent of its root image, over vsock.

use std::io::{self, Read};
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use guest_protocol::{Client, Connect, Spawn, Stream};

/// A guest that is not ready by then never will be.
const BOOTS_WITHIN: Duration = Duration::from_secs(320);

/// The agent of one guest.
pub struct Agent {
    /// The guest's name in the tables.
    pub name: String,
    connect: Arc<dyn Connect>,
}

impl Agent {
    /// The agent of the guest `name`, which is reached by `connect`.
    pub fn new(name: impl Into<String>, connect: impl Connect + 'static) -> Self {
        Self { name: name.into(), connect: Arc::new(connect) }
    }

    /// Waits until it answers, for as long as the VMM runs.
    pub fn wait_until_ready(&self, vmm: &mut Child) -> anyhow::Result<()> {
        let deadline = Instant::now() + BOOTS_WITHIN;
        loop {
            let Err(error) = self.client().and_then(|mut client| Ok(client.ping()?)) else {
                return Ok(());
            };
            if let Some(status) = vmm.try_wait()? {
                bail!("{}: the VMM has ended, {status}", self.name);
            }
            ensure!(Instant::now() < deadline, "{} is not ready: {error:#}", self.name);
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// A connection to it.
    pub fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::connect(self.connect.clone())?)
    }

    /// Runs a line of shell and gives what it prints. Its errors are on standard output, too.
    pub fn sh(&self, line: &str) -> anyhow::Result<String> {
        let mut client = self.client()?;
        let mut spawn = Spawn::new(["sh", "-c", &format!("exec 2>&1; {line}")]);
        spawn.stdout = true;
        let process = client.spawn(spawn)?.process;
        let mut text = String::new();
        client.attach(process, Stream::Stdout)?.read_to_string(&mut text)?;
        let status = client.wait(process)?;
        client.release(process)?;
        ensure!(status.success(), "{}: {line:?} in the guest: {status:?}, {text}", self.name);
        Ok(text)
    }
}

/// The kernel's vsock, for guests of VMMs that leave it to `/dev/vhost-vsock`.
#[derive(Clone, Copy, Debug)]
pub struct KernelVsock {
    /// The guest's address.
    pub cid: u32,
}

impl Connect for KernelVsock {
    fn connect(&self, port: u32) -> io::Result<UnixStream> {
        // SAFETY: takes numbers only.
        let fd = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: plain numbers, of which zero is one.
        let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
        address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
        (address.svm_cid, address.svm_port) = (self.cid, port);
        let len = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
        // SAFETY: an address of that length, which outlives the call.
        let failed =
            unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) } != 0;
        match failed {
            true => Err(io::Error::last_os_error()),
            // Reads, writes and shuts down alike; the family matters for addresses only.
            false => Ok(socket.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_is_not_there_cannot_be_reached() {
        // 2^32 - 2 is nobody's: the highest address is a wildcard.
        assert!(KernelVsock { cid: u32::MAX - 1 }.connect(52).is_err());
    }

    #[test]
    fn a_vmm_that_has_ended_is_told() {
        let mut vmm = std::process::Command::new("false").spawn().unwrap();
        vmm.wait().unwrap();
        let agent = Agent::new("no guest", guest_protocol::HybridSocket::new("/nonexistent"));
        let error = agent.wait_until_ready(&mut vmm).unwrap_err().to_string();
        assert_eq!(error, "no guest: the VMM has ended, exit status: 1");
    }
}
