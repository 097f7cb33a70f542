//! The card of the host's kernel (vhost-net) without a guest: what every device must stand, driven
//! register by register. Here since it needs a `/dev/vhost-net`, which the lab has.

use std::cell::RefCell;
use std::net::{Ipv4Addr, UdpSocket};

use devices::executor::ExecutorHandle;
use devices::ids::DeviceId;
use devices::testing::{Buffer, Conformance, GuestDriver};
use devices::virtio::VirtioDevice;
use devices::virtio::net::{Net, NetConfig, Tap};
use harness::{eventually, image, wire};
use libtest_mimic::Trial;
use nix::sys::socket::{setsockopt, sockopt};

pub fn trials() -> Vec<Trial> {
    harness::trials![the_kernels_card_conforms]
}

const RX: u16 = 0;
const TX: u16 = 1;
const CONTROL: u16 = 2;
/// Header of a frame that wants no offload.
const HEADER: usize = 12;
const FRAME: usize = 60;
/// Of the datagrams that the host sends; Ethernet, IPv4 and UDP headers come before.
const TEXT: &[u8; 16] = b"from the host...";
const PORT: u16 = 9;

/// Cards, each on an interface of its own. The interfaces stay, since to take one away costs the kernel
/// more than all that is done here.
struct Cards {
    interfaces: Vec<String>,
    latest: RefCell<String>,
}

impl Cards {
    fn new() -> Self {
        let interfaces: Vec<_> = (0..4).map(|number| format!("card{number}")).collect();
        for name in &interfaces {
            image::host("ip", &["tuntap", "add", name, "mode", "tap"]);
            image::host("ip", &["link", "set", name, "up"]);
        }
        Self { interfaces, latest: RefCell::default() }
    }

    fn make(&self, executor: ExecutorHandle) -> Box<dyn VirtioDevice> {
        let open = |name: &String| Some((name.clone(), Tap::open_named(name, 1, None).ok()?));
        let (name, taps) = self.interfaces.iter().find_map(open).unwrap();
        self.latest.replace(name);
        Box::new(Net::with_kernel(executor, taps, NetConfig::new(DeviceId::new("card"))).unwrap())
    }

    /// The interface of the card that was made last.
    fn interface(&self) -> String {
        self.latest.borrow().clone()
    }
}

/// Frames that came out of the interface since it was made.
fn arrived(interface: &str) -> u64 {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line =
        table.lines().find_map(|line| line.trim().strip_prefix(interface)?.strip_prefix(':'));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
}

/// Runs a test in a network in which nobody but it sends anything.
fn in_a_quiet_network(test: impl FnOnce() + Send) {
    wire::in_a_network(|| {
        std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        test();
    });
}

/// One frame each way.
fn exchange(driver: &mut GuestDriver, interface: &str) {
    let before = arrived(interface);
    let frame = [&[0; HEADER][..], &[0xff; FRAME]].concat();
    let sent = driver.alloc_with(&frame);
    assert_eq!(driver.exchange(TX, &[Buffer::readable(sent, frame.len() as u32)]), 0);
    eventually("the frame leaves the interface", || arrived(interface) > before);
    let buffer = driver.alloc(2048);
    driver.add(RX, &[Buffer::writable(buffer, 2048)]);
    driver.kick(RX);
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    socket.set_broadcast(true).unwrap();
    setsockopt(&socket, sockopt::BindToDevice, &interface.into()).unwrap();
    socket.send_to(TEXT, (Ipv4Addr::BROADCAST, PORT)).unwrap();
    let len = driver.wait_used(RX).len as usize;
    assert_eq!(driver.bytes(buffer, len)[len - TEXT.len()..], TEXT[..]);
}

/// The kernel never gives back a frame that is shorter than its header, so `TX` is not among the queues
/// that answer: the guest's queue stands still until it resets the card. `CUBE_RESETS` is how often it is
/// reset with and without traffic.
fn the_kernels_card_conforms() {
    in_a_quiet_network(|| {
        let cards = Cards::new();
        Conformance::new(|executor| cards.make(executor))
            .exercise(|driver| exchange(driver, &cards.interface()))
            .answers(&[CONTROL])
            .thinned(97)
            .calmed(97)
            .run();
    });
}
