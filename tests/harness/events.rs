//! What a containerd tells of its tasks, as `ctr events` shows it.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Stdio};

use serde_json::Value;

use crate::containerd::Containerd;
use crate::{eventually, oci_image};

/// A client that listens until it is dropped.
pub struct Events {
    log: PathBuf,
    client: Child,
}

impl Events {
    /// Starts one, and waits until it hears something.
    #[track_caller]
    pub fn listen(containerd: &Containerd) -> Self {
        let log = containerd.folder("events").join("log");
        let mut command = containerd.command(["events"]);
        command.stdout(File::create(&log).unwrap()).stderr(Stdio::null());
        let this = Self { log, client: command.spawn().unwrap() };
        eventually("the listener is told something", || {
            containerd.ctr(["images", "label", oci_image::NAME, "heard=yes"]).output(0);
            !this.text().is_empty()
        });
        this
    }

    fn text(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// The topics that were told of a container, in order. Its further processes have their name
    /// added.
    pub fn of(&self, id: &str) -> Vec<String> {
        let text = self.text();
        let of_task = text.lines().filter_map(|line| {
            let (head, event) = line.split_once(" {")?;
            let topic = head.split_whitespace().find_map(|word| word.strip_prefix("/tasks/"))?;
            let event: Value = serde_json::from_str(&format!("{{{event}")).ok()?;
            let mut process = ["exec_id", "id"].into_iter().filter_map(|name| event[name].as_str());
            let process = process.rfind(|name| !name.is_empty() && *name != id);
            let words = [Some(topic), process].into_iter().flatten().collect::<Vec<_>>();
            (event["container_id"] == id).then(|| words.join(" "))
        });
        of_task.collect()
    }

    /// Waits until such a topic is told of a container.
    #[track_caller]
    pub fn wait(&self, id: &str, topic: &str) {
        eventually(&format!("{topic} is told of {id}"), || {
            self.of(id).iter().any(|told| told == topic)
        });
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}
