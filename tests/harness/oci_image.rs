//! Container images of nothing but a static busybox, in an archive that containerd imports. Made
//! of files that are the same each time, so they have the same digests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::artifacts::text;

/// The name of the image that runs a shell.
pub const NAME: &str = "localhost/cube-test/busybox:1";
/// The name of the image that does nothing, for a pod's sandbox.
pub const PAUSE: &str = "localhost/cube-test/pause:1";

/// Makes the archive in `folder` and gives its path.
pub fn archive(folder: &Path) -> PathBuf {
    let root = folder.join("root");
    lay_out(&root);
    let image = folder.join("image");
    let blobs = image.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let layer = folder.join("layer.tar");
    tar(&root, &layer);
    let layer_size = fs::metadata(&layer).unwrap().len();
    let layer_digest = digest(&layer);
    fs::rename(&layer, blobs.join(&layer_digest)).unwrap();
    let layer = json!({
        "mediaType": media("layer.v1.tar"),
        "digest": format!("sha256:{layer_digest}"),
        "size": layer_size,
    });
    let manifests = [
        manifest(&blobs, &layer, NAME, &json!(["sh"])),
        manifest(&blobs, &layer, PAUSE, &json!(["sleep", "2147483647"])),
    ];
    let index = json!({"schemaVersion": 2, "manifests": manifests});
    fs::write(image.join("index.json"), index.to_string()).unwrap();
    fs::write(image.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    let archive = folder.join("image.tar");
    tar(&image, &archive);
    archive
}

fn media(kind: &str) -> String {
    format!("application/vnd.oci.image.{kind}")
}

/// An image of one layer, described for an index.
fn manifest(blobs: &Path, layer: &Value, name: &str, command: &Value) -> Value {
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Env": ["PATH=/bin:/usr/bin:/sbin", "IMAGE=busybox"],
            "Cmd": command,
        },
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    });
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": media("manifest.v1+json"),
        "config": blob(blobs, &config, &media("config.v1+json")),
        "layers": [layer],
    });
    let mut described = blob(blobs, &manifest, &media("manifest.v1+json"));
    described["annotations"] = json!({"io.containerd.image.name": name});
    described
}

fn lay_out(root: &Path) {
    for folder in ["bin", "etc", "tmp", "proc", "sys", "dev", "root", "usr/bin", "sbin"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].iter().find(|path| Path::new(path).exists());
    fs::copy(
        busybox.expect("no busybox: apt-get install busybox-static"),
        root.join("bin/busybox"),
    )
    .unwrap();
    let list = Command::new("busybox").arg("--list").output().unwrap().stdout;
    for applet in String::from_utf8(list).unwrap().lines().filter(|name| *name != "busybox") {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).unwrap();
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
        .unwrap();
    fs::write(root.join("etc/group"), "root:x:0:\nuser:x:1000:\n").unwrap();
}

fn blob(blobs: &Path, content: &Value, media: &str) -> Value {
    let file = blobs.join("new");
    let bytes = content.to_string();
    fs::write(&file, &bytes).unwrap();
    let digest = digest(&file);
    fs::rename(&file, blobs.join(&digest)).unwrap();
    json!({"mediaType": media, "digest": format!("sha256:{digest}"), "size": bytes.len()})
}

fn digest(file: &Path) -> String {
    let output = Command::new("sha256sum").arg(file).output().unwrap();
    String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().to_owned()
}

fn tar(folder: &Path, archive: &Path) {
    let status = Command::new("tar")
        .args(["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"])
        .args(["-cf", &text(archive), "-C", &text(folder), "."])
        .status()
        .unwrap();
    assert!(status.success(), "tar of {}", folder.display());
}
