//! Tells containerd what happens, in the order in which it happened.
//!
//! One queue and one sender: an event is sent again until containerd has taken it, and those behind
//! it wait. containerd may be restarted meanwhile. Only one that cannot be delivered for
//! [`PATIENCE`] is given up, with a word in the log.

use std::time::{Duration, Instant, SystemTime};

use containerd_shim_protos::events::task::{
    TaskCheckpointed, TaskCreate, TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskOOM,
    TaskPaused, TaskResumed, TaskStart,
};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{MessageField, MessageFull};
use containerd_shim_protos::shim::{event::Envelope, events::ForwardRequest};
use containerd_shim_protos::shim_async::{Client, EventsClient};
use containerd_shim_protos::{topics, ttrpc};
use tokio::sync::{mpsc, oneshot};

use crate::clock::timestamp;

/// How long an event is tried.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long containerd may take to take one.
const ANSWER: Duration = Duration::from_secs(5);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(100);

/// An event of a task, which knows its topic.
pub trait Event: MessageFull {
    /// As subscribers know it.
    const TOPIC: &'static str;
}

macro_rules! topics {
    ($($event:ty => $topic:ident,)*) => {
        $(impl Event for $event { const TOPIC: &'static str = topics::$topic; })*
    };
}

topics! {
    TaskCreate => TASK_CREATE_EVENT_TOPIC,
    TaskStart => TASK_START_EVENT_TOPIC,
    TaskExit => TASK_EXIT_EVENT_TOPIC,
    TaskDelete => TASK_DELETE_EVENT_TOPIC,
    TaskExecAdded => TASK_EXEC_ADDED_EVENT_TOPIC,
    TaskExecStarted => TASK_EXEC_STARTED_EVENT_TOPIC,
    TaskPaused => TASK_PAUSED_EVENT_TOPIC,
    TaskResumed => TASK_RESUMED_EVENT_TOPIC,
    TaskCheckpointed => TASK_CHECKPOINTED_EVENT_TOPIC,
    TaskOOM => TASK_OOM_EVENT_TOPIC,
}

enum Item {
    Event(Box<Envelope>),
    Flush(oneshot::Sender<()>),
}

/// The queue's end where events are put in.
#[derive(Clone, Debug)]
pub struct Events {
    namespace: String,
    queue: mpsc::UnboundedSender<Item>,
}

impl Events {
    /// Starts a sender to containerd's socket for events.
    pub fn start(address: &str, namespace: &str) -> Self {
        let (queue, items) = mpsc::unbounded_channel();
        let address = format!("unix://{}", address.trim_start_matches("unix://"));
        tokio::spawn(Sender { address, client: None }.run(items));
        Self { namespace: namespace.to_owned(), queue }
    }

    /// Puts an event into the queue. Never waits.
    pub fn publish<E: Event>(&self, event: &E) {
        let value = match event.write_to_bytes() {
            Ok(value) => value,
            Err(error) => return tracing::error!(%error, topic = E::TOPIC, "event not encoded"),
        };
        let type_url = E::descriptor().full_name().to_owned();
        let envelope = Envelope {
            timestamp: MessageField::some(timestamp(SystemTime::now())),
            namespace: self.namespace.clone(),
            topic: E::TOPIC.to_owned(),
            event: MessageField::some(Any { type_url, value, ..Default::default() }),
            ..Default::default()
        };
        let _ = self.queue.send(Item::Event(Box::new(envelope)));
    }

    /// Waits until all that is in the queue is sent or given up, `patience` at most.
    pub async fn flush(&self, patience: Duration) {
        let (done, flushed) = oneshot::channel();
        if self.queue.send(Item::Flush(done)).is_ok() {
            let _ = tokio::time::timeout(patience, flushed).await;
        }
    }
}

struct Sender {
    address: String,
    client: Option<EventsClient>,
}

impl Sender {
    async fn run(mut self, mut items: mpsc::UnboundedReceiver<Item>) {
        while let Some(item) = items.recv().await {
            match item {
                Item::Event(envelope) => self.deliver(*envelope).await,
                Item::Flush(done) => drop(done.send(())),
            }
        }
    }

    async fn deliver(&mut self, envelope: Envelope) {
        let topic = envelope.topic.clone();
        let request =
            ForwardRequest { envelope: MessageField::some(envelope), ..Default::default() };
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.send(&request).await {
                Ok(()) => return,
                Err(error) if Instant::now() > deadline => {
                    return tracing::error!(%error, topic, "event not delivered");
                }
                Err(error) => tracing::debug!(%error, topic, "event not delivered yet"),
            }
            // Whatever was wrong with the connection, the next one is new.
            self.client = None;
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn send(&mut self, request: &ForwardRequest) -> ttrpc::Result<()> {
        let client = match &self.client {
            Some(client) => client,
            None => self.client.insert(EventsClient::new(Client::connect(&self.address).await?)),
        };
        let context = ttrpc::context::with_duration(ANSWER);
        client.forward(context, request).await.map(drop)
    }
}
