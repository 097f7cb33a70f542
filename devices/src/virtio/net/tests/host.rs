//! A network namespace of its own, and what a test does in it in the place of the host.

use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Runs `test` in a network namespace of its own, which ends with it.
///
/// Without the permission for that, or without TAPs, it fails; where `CUBE_ALLOW_SKIP` has the word
/// `net` it says loudly that it did nothing.
pub fn in_namespace(test: impl FnOnce() + Send) {
    let outcome = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            enter()?;
            test();
            Ok(())
        });
        // A panic of the thread becomes that of the test.
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    let outcome: io::Result<()> = outcome;
    if let Err(error) = outcome {
        let allowed = std::env::var("CUBE_ALLOW_SKIP").unwrap_or_default();
        let skip = allowed.split([',', ' ']).any(|word| word == "net");
        assert!(
            skip,
            "no TAP in a network namespace: {error}; run as root with /dev/net/tun, or set \
             CUBE_ALLOW_SKIP=net to do without these tests"
        );
        eprintln!("\x1b[31mSKIPPED: no TAP in a network namespace: {error}\x1b[0m");
    }
}

fn enter() -> io::Result<()> {
    std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: only this thread changes its namespace, and it holds nothing of the old one.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Nobody but the test shall say anything.
    let _ = std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
    Ok(())
}

fn socket(domain: i32, kind: i32, protocol: i32) -> OwnedFd {
    // SAFETY: takes no pointer.
    let fd = unsafe { libc::socket(domain, kind | libc::SOCK_CLOEXEC, protocol) };
    assert!(fd >= 0, "socket: {}", io::Error::last_os_error());
    // SAFETY: the kernel has just made this descriptor, for us.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A request about the interface `name`.
pub fn request(name: &str) -> libc::ifreq {
    // SAFETY: an ifreq consists of numbers, for all of which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request
}

fn ask(what: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
    let socket = socket(libc::AF_INET, libc::SOCK_DGRAM, 0);
    // SAFETY: all requests of this file take an ifreq, which outlives the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), what, std::ptr::from_mut(request)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The number of the interface; `None` if there is none of that name.
pub fn index(name: &str) -> Option<i32> {
    let mut request = request(name);
    ask(libc::SIOCGIFINDEX, &mut request).ok()?;
    // SAFETY: the kernel has filled it in.
    Some(unsafe { request.ifr_ifru.ifru_ifindex })
}

/// The MTU of the interface.
pub fn mtu(name: &str) -> i32 {
    let mut request = request(name);
    ask(libc::SIOCGIFMTU, &mut request).unwrap();
    // SAFETY: the kernel has filled it in.
    unsafe { request.ifr_ifru.ifru_mtu }
}

fn flags(name: &str) -> libc::c_short {
    let mut request = request(name);
    ask(libc::SIOCGIFFLAGS, &mut request).unwrap();
    // SAFETY: the kernel has filled it in.
    unsafe { request.ifr_ifru.ifru_flags }
}

/// Whether the interface is up.
pub fn is_up(name: &str) -> bool {
    flags(name) & libc::IFF_UP as libc::c_short != 0
}

/// `ip link set NAME up` or `down`.
pub fn set_up(name: &str, up: bool) {
    let bit = libc::IFF_UP as libc::c_short;
    let flags = flags(name);
    let mut request = request(name);
    request.ifr_ifru.ifru_flags = if up { flags | bit } else { flags & !bit };
    ask(libc::SIOCSIFFLAGS, &mut request).unwrap();
}

/// `ip addr add ADDRESS/24 dev NAME`.
pub fn set_address(name: &str, address: Ipv4Addr) {
    for (what, address) in
        [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, Ipv4Addr::new(255, 255, 255, 0))]
    {
        let mut request = request(name);
        let [a, b, c, d] = address.octets();
        request.ifr_ifru.ifru_addr = libc::sockaddr {
            sa_family: libc::AF_INET as libc::sa_family_t,
            sa_data: [0, 0, a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0].map(|byte| byte as libc::c_char),
        };
        ask(what, &mut request).unwrap();
    }
}

/// `ip link del NAME`.
pub fn delete(name: &str) {
    let index = index(name).unwrap();
    let mut message = Vec::new();
    // A header: length, type, flags, sequence, sender. Then an ifinfomsg with the number alone.
    message.extend(32_u32.to_ne_bytes());
    message.extend(libc::RTM_DELLINK.to_ne_bytes());
    message.extend(((libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16).to_ne_bytes());
    message.extend([0; 8]);
    message.extend([0; 4]);
    message.extend(index.to_ne_bytes());
    message.extend([0; 8]);
    let mut route: UnixStream =
        socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE).into();
    route.write_all(&message).unwrap();
    let mut answer = [0; 1024];
    let len = route.read(&mut answer).unwrap();
    let error = i32::from_ne_bytes(answer[16..20].try_into().unwrap());
    assert!(len >= 20 && error == 0, "deletion of {name}: {error}");
}

/// A socket for whole frames, with a header of 10 bytes before each.
pub struct Frames(UnixStream);

impl Frames {
    /// One on the interface `name`, which hears what comes in there.
    pub fn on(name: &str) -> Self {
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        let socket =
            socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_NONBLOCK, i32::from(protocol));
        let yes: libc::c_int = 1;
        // SAFETY: the kernel reads one int.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_PACKET,
                PACKET_VNET_HDR,
                std::ptr::from_ref(&yes).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        // SAFETY: a sockaddr_ll consists of numbers, for all of which zero is valid.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = index(name).unwrap();
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the kernel reads one sockaddr_ll.
        let result =
            unsafe { libc::bind(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), len) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        Self(socket.into())
    }

    /// Lets the interface send `frame`.
    pub fn send(&self, header: [u8; 10], frame: &[u8]) -> io::Result<()> {
        (&self.0).write(&[&header, frame].concat()).map(|_| ())
    }

    /// The next packet, header and all.
    pub fn receive(&self) -> Option<Vec<u8>> {
        let mut packet = vec![0; 1 << 17];
        let len = (&self.0).read(&mut packet).ok()?;
        packet.truncate(len);
        Some(packet)
    }
}

const PACKET_VNET_HDR: libc::c_int = 15;

/// Takes CAP_NET_ADMIN from this thread, for good.
pub fn drop_capability() {
    const NET_ADMIN: u32 = 1 << 12;
    let header: [u32; 2] = [0x2008_0522, 0];
    let mut sets = [0_u32; 6];
    // SAFETY: version 3 has two sets of three words, which the kernel fills in.
    let result = unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) };
    assert_eq!(result, 0);
    sets[0] &= !NET_ADMIN;
    // SAFETY: the same words, which the kernel reads.
    let result = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
    assert_eq!(result, 0);
}
