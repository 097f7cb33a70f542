//! How a TAP is opened, or taken over from whoever has opened it.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use super::{HEADER_LEN, Offloads, Tap, TapError, holder};
use crate::virtio::net::config::MAX_QUEUE_PAIRS;

/// What every queue is attached with: whole frames, after a header of virtio's, and nothing else.
const FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

impl Tap {
    /// Opens `queues` queues of the interface `name`. One that does not exist is created, brought
    /// up, and given `mtu`; one that exists is left as it is.
    ///
    /// What was created goes away with its last queue.
    pub fn open_named(name: &str, queues: u16, mtu: Option<u16>) -> Result<Vec<Tap>, TapError> {
        if !(1..=MAX_QUEUE_PAIRS).contains(&queues) {
            return Err(TapError::Queues(queues));
        }
        let allowed = |c: u8| c.is_ascii_graphic() && !b"/:%".contains(&c);
        if name.is_empty() || name.len() >= libc::IFNAMSIZ || !name.bytes().all(allowed) {
            return Err(TapError::Name(name.to_owned()));
        }
        let network = Network::new(name)?;
        let existed = network.exists();
        if queues > 1
            && existed
            && let Some(holder) = holder::here(name)
        {
            // The kernel would let us have a part of the other's frames.
            return Err(TapError::Busy { name: name.to_owned(), holder });
        }
        let (first, multi) = attach_first(name, queues)?;
        let mut fds = vec![first];
        while fds.len() < usize::from(queues) {
            let fd = open_driver()?;
            attach(&fd, name, multi).map_err(|error| attach_error(name, error))?;
            fds.push(fd);
        }
        if existed {
            network.compare_mtu(mtu);
        } else {
            network.bring_up(mtu)?;
        }
        fds.into_iter().map(|fd| Tap::prepare(fd, name.to_owned(), multi != 0)).collect()
    }

    /// Takes over a descriptor of `/dev/net/tun` that somebody has attached to a TAP, in whatever
    /// network namespace.
    pub fn from_fd(fd: OwnedFd) -> Result<Tap, TapError> {
        let number = fd.as_raw_fd();
        let foreign = |why| TapError::Foreign { fd: number, why };
        let mut attached = request("");
        call(&fd, libc::TUNGETIFF, &mut attached).map_err(|error| match error.raw_os_error() {
            Some(libc::EBADFD) => foreign("it is attached to no interface"),
            _ => foreign("it is no descriptor of /dev/net/tun"),
        })?;
        // SAFETY: the kernel has filled in the flags.
        let flags = libc::c_int::from(unsafe { attached.ifr_ifru.ifru_flags });
        let name = name_of(&attached);
        if flags & libc::IFF_TAP == 0 {
            return Err(foreign("it is attached to a TUN interface, which has no frames"));
        }
        let refused = |flag| TapError::Flags { fd: number, name: name.clone(), flag };
        if flags & libc::IFF_VNET_HDR == 0 {
            return Err(refused("without IFF_VNET_HDR"));
        }
        let tap = Tap::prepare(fd, name.clone(), flags & libc::IFF_MULTI_QUEUE != 0)?;
        // Not in the flags: Linux 6.18 says IFF_NO_PI of every interface.
        match tap.wants_packet_information() {
            true => Err(refused("without IFF_NO_PI")),
            false => Ok(tap),
        }
    }

    /// The same for the number of a descriptor that this process was started with. It is
    /// duplicated: the number stays as it is.
    pub fn from_inherited(fd: RawFd) -> Result<Tap, TapError> {
        // SAFETY: a number that is no open descriptor makes this call fail and does nothing else.
        let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
        if copy < 0 {
            return Err(TapError::Closed(fd));
        }
        // SAFETY: the kernel has just made this descriptor, for us.
        let copy = unsafe { OwnedFd::from_raw_fd(copy) };
        Tap::from_fd(copy).map_err(|error| match error {
            TapError::Foreign { why, .. } => TapError::Foreign { fd, why },
            TapError::Flags { name, flag, .. } => TapError::Flags { fd, name, flag },
            other => other,
        })
    }

    /// True if the kernel takes the first four bytes of what is written for something else than the
    /// header. Asked with a frame of 14 bytes of which not all can be read: it is refused as
    /// unreadable, or, four bytes shorter, as too short before that; never sent.
    fn wants_packet_information(&self) -> bool {
        let readable = [0_u8; HEADER_LEN + 4];
        let vectors = [
            libc::iovec { iov_base: readable.as_ptr().cast_mut().cast(), iov_len: readable.len() },
            libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 10 },
        ];
        // SAFETY: the kernel reads from the first vector, which outlives the call; it checks the
        // second, and fails with EFAULT.
        let result = unsafe { libc::writev(self.fd.as_raw_fd(), vectors.as_ptr(), 2) };
        result < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL)
    }

    fn prepare(fd: OwnedFd, name: String, multi_queue: bool) -> Result<Tap, TapError> {
        let failed = |what| {
            let name = name.clone();
            move |source| TapError::Call { name, what, source }
        };
        set_non_blocking(&fd).map_err(failed("O_NONBLOCK"))?;
        let mut len = HEADER_LEN as libc::c_int;
        call(&fd, libc::TUNSETVNETHDRSZ, &mut len).map_err(failed("TUNSETVNETHDRSZ"))?;
        let mut yes: libc::c_int = 1;
        call(&fd, libc::TUNSETVNETLE, &mut yes).map_err(failed("TUNSETVNETLE"))?;
        let mut tap = Tap {
            fd,
            name: name.clone(),
            offloads: Offloads::none(),
            multi_queue,
            #[cfg(test)]
            stand_in: None,
        };
        let large = [Offloads::TSO4, Offloads::TSO6, Offloads::ECN];
        let large = large.into_iter().fold(Offloads::CSUM, Offloads::and);
        let candidates = [large.and(Offloads::UFO), large, Offloads::CSUM];
        let accepted = candidates.into_iter().find(|&all| tap.set_offloads(all).is_ok());
        tap.offloads = accepted.unwrap_or_default();
        // Nothing is left to a guest that has not said what it takes.
        tap.set_offloads(Offloads::none()).map_err(failed("TUNSETOFFLOAD"))?;
        Ok(tap)
    }
}

/// The first queue, and the flag for the others.
fn attach_first(name: &str, queues: u16) -> Result<(OwnedFd, libc::c_int), TapError> {
    let multi = if queues > 1 { libc::IFF_MULTI_QUEUE } else { 0 };
    let fd = open_driver()?;
    let Err(error) = attach(&fd, name, multi) else {
        return Ok((fd, multi));
    };
    if error.raw_os_error() != Some(libc::EINVAL) {
        return Err(attach_error(name, error));
    }
    // There is something of that name that is not as we want it.
    let other = multi ^ libc::IFF_MULTI_QUEUE;
    match attach(&fd, name, other) {
        // An interface that can have several queues may have one.
        Ok(()) if queues == 1 => Ok((fd, other)),
        Ok(()) => Err(TapError::SingleQueue { name: name.to_owned(), queues }),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) && queues > 1 => {
            Err(TapError::SingleQueue { name: name.to_owned(), queues })
        }
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Err(not_a_tap(name)),
        Err(error) => Err(attach_error(name, error)),
    }
}

fn attach(fd: &OwnedFd, name: &str, multi: libc::c_int) -> io::Result<()> {
    let mut request = request(name);
    request.ifr_ifru.ifru_flags = (FLAGS | multi) as libc::c_short;
    call(fd, libc::TUNSETIFF, &mut request)
}

fn not_a_tap(name: &str) -> TapError {
    let is_tun = |multi| {
        let Ok(fd) = open_driver() else {
            return false;
        };
        let mut request = request(name);
        request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI | multi) as libc::c_short;
        // Whoever has it will not mind: it is let go at once.
        match call(&fd, libc::TUNSETIFF, &mut request) {
            Ok(()) => true,
            Err(error) => error.raw_os_error() == Some(libc::EBUSY),
        }
    };
    let tun = is_tun(0) || is_tun(libc::IFF_MULTI_QUEUE);
    let kind = if tun { "a TUN interface" } else { "an interface of another kind" };
    TapError::NotTap { name: name.to_owned(), kind }
}

fn attach_error(name: &str, source: io::Error) -> TapError {
    let name = name.to_owned();
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => TapError::Denied(name),
        Some(libc::EBUSY) => TapError::Busy { holder: holder::describe(&name), name },
        _ => TapError::Call { name, what: "TUNSETIFF", source },
    }
}

fn open_driver() -> Result<OwnedFd, TapError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    Ok(options.open("/dev/net/tun").map_err(TapError::NoDriver)?.into())
}

fn set_non_blocking(fd: &OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is open, and this call takes no pointer.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// An ioctl that reads, and perhaps writes, `argument`.
pub(super) fn call<T>(fd: &OwnedFd, request: libc::Ioctl, argument: &mut T) -> io::Result<()> {
    ioctl(fd.as_raw_fd(), request, argument)
}

fn ioctl<T>(fd: RawFd, request: libc::Ioctl, argument: &mut T) -> io::Result<()> {
    // SAFETY: the calls of this file name requests whose argument is an int or an ifreq, and pass
    // just that; the kernel uses it during the call only.
    let result = unsafe { libc::ioctl(fd, request, std::ptr::from_mut(argument)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A request about the interface `name`, which is cut to fit.
pub(super) fn request(name: &str) -> libc::ifreq {
    // SAFETY: an ifreq consists of numbers, for all of which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(room)) {
        *to = from as libc::c_char;
    }
    request
}

fn name_of(request: &libc::ifreq) -> String {
    let bytes: Vec<u8> =
        request.ifr_name.iter().map(|&c| c as u8).take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

// --- the interface on the host -----------------------------------------------------------------

/// The host's side of an interface, as `ip link` sees it.
struct Network<'a> {
    name: &'a str,
    socket: OwnedFd,
}

impl<'a> Network<'a> {
    fn new(name: &'a str) -> Result<Self, TapError> {
        // SAFETY: takes no pointer.
        let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            let source = io::Error::last_os_error();
            return Err(TapError::Call { name: name.to_owned(), what: "socket", source });
        }
        // SAFETY: the kernel has just made this descriptor, for us.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { name, socket })
    }

    fn ask(&self, what: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
        call(&self.socket, what, request)
    }

    fn exists(&self) -> bool {
        self.ask(libc::SIOCGIFINDEX, &mut request(self.name)).is_ok()
    }

    fn compare_mtu(&self, wanted: Option<u16>) {
        let mut mtu = request(self.name);
        let (Some(wanted), Ok(())) = (wanted, self.ask(libc::SIOCGIFMTU, &mut mtu)) else {
            return;
        };
        // SAFETY: the kernel has filled in the MTU.
        let mtu = unsafe { mtu.ifr_ifru.ifru_mtu };
        if mtu < i32::from(wanted) {
            let interface = self.name;
            tracing::warn!(
                interface,
                mtu,
                wanted,
                "the guest's MTU is above that of its interface"
            );
        }
    }

    fn bring_up(&self, mtu: Option<u16>) -> Result<(), TapError> {
        let failed =
            |what| move |source| TapError::Call { name: self.name.to_owned(), what, source };
        if let Some(mtu) = mtu {
            let mut request = request(self.name);
            request.ifr_ifru.ifru_mtu = i32::from(mtu);
            self.ask(libc::SIOCSIFMTU, &mut request).map_err(failed("setting its MTU"))?;
        }
        let mut flags = request(self.name);
        self.ask(libc::SIOCGIFFLAGS, &mut flags).map_err(failed("reading its flags"))?;
        // SAFETY: the kernel has filled in the flags.
        let now = unsafe { flags.ifr_ifru.ifru_flags };
        flags.ifr_ifru.ifru_flags = now | libc::IFF_UP as libc::c_short;
        self.ask(libc::SIOCSIFFLAGS, &mut flags).map_err(failed("bringing it up"))
    }
}
