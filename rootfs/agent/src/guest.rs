//! The state of the guest: what it tells about itself, and how it gets a new identity.

use crate::network;
use crate::refusal::Refusal;
use guest_protocol::{Configure, Hello, Info, PROTOCOL_VERSION, Renew};
use nix::errno::Errno;
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime, clock_settime};
use nix::unistd::sethostname;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

/// As many bytes of entropy as are taken at once.
const MAX_ENTROPY: usize = 512;

fn read(path: &str) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// What the agent says first; `root` is what commands see as `/`.
pub fn hello(root: String) -> Hello {
    Hello {
        protocol_version: PROTOCOL_VERSION,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel_release: read("/proc/sys/kernel/osrelease"),
        boot_id: read("/proc/sys/kernel/random/boot_id"),
        root,
    }
}

/// What the agent says when asked.
pub fn info(hello: &Hello, processes: usize) -> Info {
    let memory = read("/proc/meminfo");
    let uptime = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from);
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Info {
        hello: hello.clone(),
        hostname: read("/proc/sys/kernel/hostname"),
        uptime_ms: u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX),
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory_total_kib: kib(&memory, "MemTotal:"),
        memory_available_kib: kib(&memory, "MemAvailable:"),
        processes: u32::try_from(processes).unwrap_or(u32::MAX),
    }
}

/// The number in the line of `/proc/meminfo` that starts with `name`.
fn kib(meminfo: &str, name: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Takes on the identity that the host gives.
pub fn renew(renew: &Renew) -> Result<(), Refusal> {
    if let Some(nanos) = renew.unix_nanos {
        let time = TimeSpec::from(Duration::from_nanos(nanos));
        let set = clock_settime(ClockId::CLOCK_REALTIME, time);
        set.map_err(Refusal::system("set the clock"))?;
    }
    if !renew.entropy.is_empty() {
        add_entropy(&renew.entropy)?;
    }
    if let Some(name) = &renew.hostname {
        sethostname(name).map_err(Refusal::system("set the host name"))?;
    }
    Ok(())
}

/// Takes on the names and addresses that the host gives.
pub fn configure(configure: &Configure) -> Result<(), Refusal> {
    if let Some(id) = &configure.machine_id {
        if id.len() != 32 || !id.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(Refusal::Invalid("a machine id is 32 hexadecimal digits"));
        }
        replace("/etc/machine-id", &format!("{id}\n"))
            .map_err(Refusal::io("write /etc/machine-id"))?;
    }
    configure.network.iter().try_for_each(network::configure)
}

/// Who reads the file meanwhile reads all of the old or all of the new one.
fn replace(path: &str, content: &str) -> io::Result<()> {
    let new = format!("{path}.new");
    fs::write(&new, content)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o444))?;
    fs::rename(&new, path)
}

/// Credits `bytes` to the kernel's generator and makes it use them at once.
fn add_entropy(bytes: &[u8]) -> Result<(), Refusal> {
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

    if bytes.len() > MAX_ENTROPY {
        return Err(Refusal::Invalid("more than 512 bytes of entropy"));
    }
    let random = OpenOptions::new().write(true).open("/dev/urandom");
    let random = random.map_err(Refusal::io("open /dev/urandom"))?;
    // struct rand_pool_info: the count of bits, the count of bytes, the bytes, in whole words.
    let mut pool = vec![0_u32; 2 + bytes.len().div_ceil(4)];
    let length = u32::try_from(bytes.len()).map_err(|_| Refusal::Invalid("too much entropy"))?;
    pool[0] = length * 8;
    pool[1] = length;
    for (word, chunk) in pool[2..].iter_mut().zip(bytes.chunks(4)) {
        let mut four = [0; 4];
        four[..chunk.len()].copy_from_slice(chunk);
        *word = u32::from_ne_bytes(four);
    }
    // SAFETY: the buffer holds as many bytes as it says, and the kernel only reads it.
    let added = unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY as _, pool.as_ptr()) };
    Errno::result(added).map_err(Refusal::system("add entropy"))?;
    // SAFETY: takes no argument.
    let reseeded = unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG as _, 0) };
    Errno::result(reseeded).map(drop).map_err(Refusal::system("reseed the random generator"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_by_name() {
        let text = "MemTotal:       24590876 kB\nMemAvailable:   7 kB\n";
        assert_eq!((kib(text, "MemTotal:"), kib(text, "MemAvailable:")), (24_590_876, 7));
        assert_eq!(kib(text, "MemFree:"), 0);
    }
}
