//! The way from this process to the agent in the guest, and the agent's hello.

use std::io;
use std::time::{Duration, Instant};

use devices::virtio::vsock::{VsockHandle, VsockListener};
use guest_protocol::{Client, Connect, Error, Hello, READY_PORT, frame};

use crate::command::guest_command::with_causes;
use crate::event::{Event, Events};
use crate::identity::Identity;

/// How long a guest that has connected may take to say hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// The guest, over the VM's own vsock device, without a socket file.
#[derive(Clone)]
pub struct Guest(pub VsockHandle);

impl Connect for Guest {
    fn connect(&self, port: u32) -> io::Result<std::os::unix::net::UnixStream> {
        self.0.connect(port)
    }
}

/// Waits on a thread for the agent's hello and sends it to the control thread, as often as a guest
/// says it.
pub fn watch_for_hello(vsock: &VsockHandle, events: Events) -> io::Result<()> {
    HelloListener::new(vsock)?.watch(events)
}

/// The place to which the agent connects to say hello. Who comes before somebody watches waits.
pub struct HelloListener(VsockListener);

impl HelloListener {
    /// Makes it. Before the guest runs.
    pub fn new(vsock: &VsockHandle) -> io::Result<Self> {
        Ok(Self(vsock.listen(READY_PORT)?))
    }

    /// As [`watch_for_hello`].
    pub fn watch(self, events: Events) -> io::Result<()> {
        std::thread::Builder::new()
            .name("hello".to_owned())
            .stack_size(128 * 1024)
            .spawn(move || watch(&self.0, &events))?;
        Ok(())
    }
}

/// How long the agent of a restored guest may take to answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// The first pause between attempts to reach it, which doubles up to the second.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(100)];

/// Makes a restored guest one of its own, on a thread. Then it is ready, as it was when it said
/// `hello`, which the control thread hears, or that it is not.
pub fn renew(vsock: &VsockHandle, hello: Hello, identity: Identity, events: Events) {
    let guest = Guest(vsock.clone());
    let sender = events.clone();
    let ask = move || {
        let (started, [mut pause, longest]) = (Instant::now(), PAUSES);
        while events.outcome().is_none() {
            match ask_to_renew(guest.clone(), &identity) {
                Ok(()) => return events.send(Event::Ready(hello)),
                // It has answered, and would answer the same again.
                Err(error @ Error::Refused { .. }) => {
                    return events.send(Event::NotReady(format!("its agent refused: {error}")));
                }
                Err(error) if started.elapsed() > PATIENCE => {
                    return events.send(Event::NotReady(with_causes(&error)));
                }
                Err(error) => tracing::debug!(%error, "the restored guest is not ready"),
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(longest);
        }
        false
    };
    let thread = std::thread::Builder::new().name("renew".to_owned()).stack_size(128 * 1024);
    if let Err(error) = thread.spawn(ask) {
        sender.send(Event::NotReady(format!("no thread to tell it: {error}")));
    }
}

fn ask_to_renew(guest: Guest, identity: &Identity) -> Result<(), Error> {
    let mut client = Client::connect(guest)?;
    // The time is that of this attempt.
    client.renew(identity.renew())?;
    identity.configure().map_or(Ok(()), |configure| client.configure(configure))
}

fn watch(listener: &VsockListener, events: &Events) {
    loop {
        match listener.accept_timeout(Duration::from_secs(3600)) {
            Ok(stream) => match frame::read_hello(&stream, HELLO_TIMEOUT) {
                Ok(hello) => {
                    if !events.send(Event::Ready(hello)) {
                        return;
                    }
                }
                Err(error) => tracing::warn!(%error, "a guest connection that is no hello"),
            },
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {}
            // The device is gone, and so is the VM.
            Err(_) => return,
        }
    }
}
