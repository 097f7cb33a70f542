//! What the parts of a card share, and the way into it for the rest of the process.
//!
//! The queue pairs, the control queue and the device itself look at the same few words; none of
//! them waits for another.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::config::MacAddress;
use super::feature;
use super::tap::{HEADER_LEN, Moved, Offloads, Tap};
use crate::event::Event;
use crate::metrics::LOGGED_FAULTS;
use crate::rate_limiter::{RateLimit, RateLimiter};
use crate::virtio::Notifier;
use crate::virtio::vectors::Gather;
use crate::virtio::vhost::user::Switch;

/// Bits of the status field (virtio 1.3, section 5.1.4).
pub(super) mod status {
    /// There is a link.
    pub const LINK_UP: u16 = 1;
    /// The guest should announce itself.
    pub const ANNOUNCE: u16 = 2;
}

// --- counters ----------------------------------------------------------------------------------

/// Declares the counters once: as they are kept, and as they are read.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What a card has done since it was made. Bytes are those of frames, without the header of
        /// virtio.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct NetCounters {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(super) struct Counters {
            $(pub $name: AtomicU64,)*
        }

        impl Counters {
            fn read(&self) -> NetCounters {
                NetCounters { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Frames given to the guest.
    rx_frames,
    /// Their bytes.
    rx_bytes,
    /// Frames that did not get to the guest: no link, too large for its buffers, or with an
    /// offload that it has switched off.
    rx_dropped,
    /// Times that the guest had no buffers for what was there.
    rx_stalled,
    /// Times that frames had to wait for the rate limit.
    rx_throttled,
    /// Frames given to the host.
    tx_frames,
    /// Their bytes.
    tx_bytes,
    /// Frames that the host did not get: no link, refused by it, or faulty.
    tx_dropped,
    /// Times that the interface was full.
    tx_blocked,
    /// Times that frames had to wait for the rate limit.
    tx_throttled,
    /// Faulty frames, buffers and commands, and rings that cost the driver its card.
    guest_faults,
    /// Times that the interface went down or away.
    link_losses,
    /// Interrupts passed on for who moves the frames in our place.
    calls,
}

pub(super) fn count(counter: &AtomicU64) -> u64 {
    add(counter, 1)
}

/// Adds; what it was before.
pub(super) fn add(counter: &AtomicU64, number: usize) -> u64 {
    counter.fetch_add(number as u64, Ordering::Relaxed)
}

// --- shared state ------------------------------------------------------------------------------

pub(super) struct Shared {
    /// One per queue pair.
    pub taps: Vec<Tap>,
    pub counters: Counters,
    /// Wakes the pair of the same place.
    wakes: Vec<Event>,
    mac: AtomicU64,
    /// What the operator wants.
    link: AtomicBool,
    /// A bit per pair whose interface is down or gone.
    lost: AtomicU16,
    announce: AtomicBool,
    /// What was negotiated; 0 without a driver.
    features: AtomicU64,
    /// Pairs in use.
    pairs: AtomicU16,
    /// The bits of `GUEST_…` features in force.
    offloads: AtomicU64,
    notifier: Mutex<Option<Notifier>>,
    /// Of a backend that moves the frames.
    switch: Option<Switch>,
    rx_limiter: Option<Mutex<RateLimiter>>,
    tx_limiter: Option<Mutex<RateLimiter>>,
}

impl Shared {
    pub fn new(
        taps: Vec<Tap>,
        mac: MacAddress,
        rx: RateLimit,
        tx: RateLimit,
    ) -> std::io::Result<Self> {
        let now = Instant::now();
        let limiter =
            |limit: RateLimit| (!limit.is_none()).then(|| Mutex::new(RateLimiter::new(limit, now)));
        let wakes = taps.iter().map(|_| Event::new()).collect::<Result<_, _>>()?;
        Ok(Self {
            taps,
            counters: Counters::default(),
            wakes,
            mac: AtomicU64::new(word(mac)),
            link: AtomicBool::new(true),
            lost: AtomicU16::new(0),
            announce: AtomicBool::new(false),
            features: AtomicU64::new(0),
            pairs: AtomicU16::new(1),
            offloads: AtomicU64::new(0),
            notifier: Mutex::new(None),
            switch: None,
            rx_limiter: limiter(rx),
            tx_limiter: limiter(tx),
        })
    }

    /// True if all of `features` were negotiated.
    pub fn has(&self, features: u64) -> bool {
        self.features() & features == features
    }

    pub fn features(&self) -> u64 {
        self.features.load(Ordering::Acquire)
    }

    pub fn set_features(&self, features: u64) {
        self.features.store(features, Ordering::Release);
    }

    pub fn mac(&self) -> [u8; 6] {
        let [a, b, c, d, e, f, _, _] = self.mac.load(Ordering::Acquire).to_be_bytes();
        [a, b, c, d, e, f]
    }

    pub fn set_mac(&self, mac: MacAddress) {
        self.mac.store(word(mac), Ordering::Release);
    }

    /// Queue pairs that the guest uses.
    pub fn pairs(&self) -> u16 {
        self.pairs.load(Ordering::Acquire)
    }

    /// The frames are moved by a backend, whose rings are switched so.
    pub fn set_switch(&mut self, switch: Switch) {
        self.switch = Some(switch);
    }

    /// Rings of a backend that are worked on now: those of the pairs in use, if there is a link.
    pub fn rings(&self) -> u16 {
        if self.link_wanted() { 2 * self.pairs() } else { 0 }
    }

    fn switch_rings(&self) -> std::io::Result<()> {
        let switched = self.switch.as_ref().map(|switch| switch.enable_below(self.rings()));
        switched.transpose().map(|_| ()).map_err(std::io::Error::other)
    }

    /// Makes the guest use the first `pairs` pairs: only to these does the host give frames.
    pub fn set_pairs(&self, pairs: u16) -> std::io::Result<()> {
        for (index, tap) in self.taps.iter().enumerate() {
            match tap.set_attached(index < usize::from(pairs)) {
                Err(error) if !tap.is_gone() => return Err(error),
                _ => {}
            }
        }
        self.pairs.store(pairs, Ordering::Release);
        self.wake_all();
        self.switch_rings()
    }

    /// The bits of `GUEST_…` features in force.
    pub fn offloads(&self) -> u64 {
        self.offloads.load(Ordering::Acquire)
    }

    /// Puts these in force.
    pub fn set_offloads(&self, features: u64) -> std::io::Result<()> {
        let Some(tap) = self.taps.first() else {
            return Ok(());
        };
        match tap.set_offloads(of_features(features)) {
            Err(error) if !tap.is_gone() => return Err(error),
            _ => {}
        }
        self.offloads.store(features, Ordering::Release);
        Ok(())
    }

    /// Forgets what the driver has set up; the address is `mac` again.
    pub fn reset(&self, mac: MacAddress) {
        self.restore(mac, 1, false);
        self.set_features(0);
        self.offloads.store(0, Ordering::Release);
    }

    /// What a record says. Takes effect with the next start.
    pub fn restore(&self, mac: MacAddress, pairs: u16, announce: bool) {
        self.set_mac(mac);
        self.pairs.store(pairs, Ordering::Release);
        self.announce.store(announce, Ordering::Release);
    }

    // --- link ---

    /// The operator wants a link, and it is there.
    pub fn link_is_up(&self) -> bool {
        self.link_wanted() && self.lost.load(Ordering::Acquire) == 0
    }

    pub fn link_wanted(&self) -> bool {
        self.link.load(Ordering::Acquire)
    }

    /// What the guest reads in its configuration space.
    pub fn status(&self) -> u16 {
        let link = if self.link_is_up() { status::LINK_UP } else { 0 };
        let announce = self.announce.load(Ordering::Acquire) && self.has(feature::GUEST_ANNOUNCE);
        link | if announce { status::ANNOUNCE } else { 0 }
    }

    /// Does `change`, and tells the guest if its status is another one then.
    fn change_status(&self, change: impl FnOnce(&Self)) {
        let before = self.status();
        change(self);
        if self.status() != before {
            self.config_changed();
        }
    }

    pub fn set_link(&self, up: bool) {
        self.change_status(|shared| shared.link.store(up, Ordering::Release));
        self.wake_all();
        if let Err(error) = self.switch_rings() {
            tracing::warn!(%error, up, "network card: its backend does not follow the link");
        }
    }

    /// The interface of pair `pair` is down or gone, or is back.
    pub fn set_lost(&self, pair: usize, lost: bool) {
        let bit = 1_u16 << (pair & 15);
        self.change_status(|shared| {
            match lost {
                true => shared.lost.fetch_or(bit, Ordering::AcqRel),
                false => shared.lost.fetch_and(!bit, Ordering::AcqRel),
            };
        });
    }

    /// The backend that moves the frames is gone, and with it the link.
    pub fn backend_is_gone(&self) {
        count(&self.counters.link_losses);
        self.set_lost(0, true);
    }

    pub fn set_announce(&self, wanted: bool) {
        self.change_status(|shared| shared.announce.store(wanted, Ordering::Release));
    }

    /// The guest has announced itself. It knows that, and is not told.
    pub fn announced(&self) {
        self.announce.store(false, Ordering::Release);
    }

    pub fn announce_wanted(&self) -> bool {
        self.announce.load(Ordering::Acquire)
    }

    /// Who is told of changes; nobody while the device is stopped.
    pub fn set_notifier(&self, notifier: Option<Notifier>) {
        *self.notifier.lock().unwrap_or_else(PoisonError::into_inner) = notifier;
    }

    pub fn config_changed(&self) {
        let notifier = self.notifier.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(notifier) = notifier {
            notifier.config_changed();
        }
    }

    // --- pairs ---

    /// The event that wakes pair `pair`.
    pub fn wake(&self, pair: usize) -> Option<&Event> {
        self.wakes.get(pair)
    }

    fn wake_all(&self) {
        self.wakes.iter().for_each(Event::signal);
    }

    /// Whether a frame may be received; if not, in how long.
    pub fn admit_rx(&self) -> Result<(), Duration> {
        admit(self.rx_limiter.as_ref())
    }

    /// A frame of `bytes` bytes was received.
    pub fn charge_rx(&self, bytes: usize) {
        charge(self.rx_limiter.as_ref(), bytes);
    }

    /// Whether a frame may be sent; if not, in how long.
    pub fn admit_tx(&self) -> Result<(), Duration> {
        admit(self.tx_limiter.as_ref())
    }

    /// A frame of `bytes` bytes was sent.
    pub fn charge_tx(&self, bytes: usize) {
        charge(self.tx_limiter.as_ref(), bytes);
    }

    /// Counts a fault of the guest, and logs the first few.
    pub fn guest_fault(&self, fault: &dyn std::fmt::Display) {
        if count(&self.counters.guest_faults) < LOGGED_FAULTS {
            let interface = self.taps.first().map_or("", Tap::name);
            tracing::warn!(interface, "network card: {fault}");
        }
    }
}

fn admit(limiter: Option<&Mutex<RateLimiter>>) -> Result<(), Duration> {
    match limiter {
        None => Ok(()),
        Some(limiter) => {
            let now = Instant::now();
            limiter.lock().unwrap_or_else(PoisonError::into_inner).admit(now)
        }
    }
}

fn charge(limiter: Option<&Mutex<RateLimiter>>, bytes: usize) {
    if let Some(limiter) = limiter {
        limiter.lock().unwrap_or_else(PoisonError::into_inner).charge(bytes as u64);
    }
}

fn word(mac: MacAddress) -> u64 {
    let [a, b, c, d, e, f] = mac.bytes();
    u64::from_be_bytes([a, b, c, d, e, f, 0, 0])
}

/// What the host is asked for, for a guest with `features`. Without checksums there is nothing
/// else, and congestion notification is nothing without segmentation (virtio 1.3, section
/// 5.1.3.1): Linux refuses what does not go together.
fn of_features(features: u64) -> Offloads {
    if features & feature::GUEST_CSUM == 0 {
        return Offloads::none();
    }
    let tcp = features & (feature::GUEST_TSO4 | feature::GUEST_TSO6) != 0;
    let pairs = [
        (feature::GUEST_TSO4, Offloads::TSO4),
        (feature::GUEST_TSO6, Offloads::TSO6),
        (if tcp { feature::GUEST_ECN } else { 0 }, Offloads::ECN),
        (feature::GUEST_UFO, Offloads::UFO),
    ];
    pairs
        .into_iter()
        .filter(|(bit, _)| features & bit != 0)
        .fold(Offloads::CSUM, |all, (_, offload)| all.and(offload))
}

// --- handle ------------------------------------------------------------------------------------

/// The way to a card for the rest of the process. Clones are the same card.
#[derive(Clone)]
pub struct NetHandle(Arc<Shared>);

impl NetHandle {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    /// Plugs the cable in, or pulls it out: without a link frames are dropped both ways, and the
    /// guest is told. There is one at first.
    pub fn set_link(&self, up: bool) {
        self.0.set_link(up);
    }

    /// True if the guest has a link: it is wanted, and the interface is there.
    pub fn link_is_up(&self) -> bool {
        self.0.link_is_up()
    }

    /// Makes the network learn where the guest is now, as after a restore: sends a frame with its
    /// address for the switches, and asks a guest that can to announce its own addresses. To be
    /// called at any time; the guest hears of it when it runs.
    pub fn announce(&self) {
        if let Some(tap) = self.0.taps.first() {
            // One frame; that it may be lost is in the nature of networks.
            let _: Moved = send(tap, &reverse_arp(self.0.mac()));
        }
        self.0.set_announce(true);
    }

    /// The address that the card has now.
    pub fn mac(&self) -> [u8; 6] {
        self.0.mac()
    }

    /// The interface on the host.
    pub fn interface(&self) -> &str {
        self.0.taps.first().map_or("", Tap::name)
    }

    /// What the card has done so far.
    pub fn counters(&self) -> NetCounters {
        self.0.counters.read()
    }
}

fn send(tap: &Tap, frame: &[u8]) -> Moved {
    let mut gather = Gather::with_capacity(2);
    gather.push_host(&[0; HEADER_LEN]);
    gather.push_host(frame);
    tap.send(&gather)
}

/// A request of reverse ARP (RFC 903) for the sender's own address, to everybody.
fn reverse_arp(mac: [u8; 6]) -> [u8; 60] {
    let fields: [&[u8]; 8] = [
        &[0xff; 6],
        &mac,
        &[0x80, 0x35],
        // Ethernet and IPv4, with addresses of 6 and 4 bytes; request reverse.
        &[0, 1, 8, 0, 6, 4, 0, 3],
        &mac,
        &[0; 4],
        &mac,
        &[0; 4],
    ];
    let mut frame = [0; 60];
    for (to, from) in frame.iter_mut().zip(fields.into_iter().flatten()) {
        *to = *from;
    }
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_asked_for_what_goes_together() {
        let all = feature::GUEST_TSO4 | feature::GUEST_TSO6 | feature::GUEST_ECN;
        assert_eq!(of_features(all), Offloads::none());
        assert!(of_features(all | feature::GUEST_CSUM).has(Offloads::CSUM.and(Offloads::TSO6)));
        assert!(of_features(all | feature::GUEST_CSUM).has(Offloads::ECN));
        assert!(!of_features(all | feature::GUEST_CSUM).has(Offloads::UFO));
        let no_tcp = feature::GUEST_CSUM | feature::GUEST_ECN;
        assert_eq!(of_features(no_tcp), Offloads::CSUM);
    }

    #[test]
    fn the_frame_for_the_switches_has_the_address_in_three_places() {
        let mac = [2, 1, 2, 3, 4, 5];
        let frame = reverse_arp(mac);
        assert_eq!(frame[..6], [0xff; 6]);
        for place in [6, 22, 32] {
            assert_eq!(frame[place..place + 6], mac);
        }
        assert_eq!(frame[12..22], [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    }
}
