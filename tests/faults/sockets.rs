//! Control sockets and vsock sockets.

use std::fs;
use std::os::unix::net::UnixListener;

use crate::start;
use harness::{Place, image};

#[test]
fn an_api_socket_of_a_living_vm() {
    let place = Place::new();
    let path = harness::artifacts::text(&place.given_path("api"));
    let listener = UnixListener::bind(&path).unwrap();
    let ended = start(&place, &path, &[]).end();
    ended.assert_refused(&[&path, "in use by a running VM", "choose another path"]);
    assert!(fs::exists(&path).unwrap(), "the socket of the other VM must stay");
    drop(listener);
}

#[test]
fn a_stale_api_socket_is_no_obstacle() {
    let place = Place::new();
    drop(UnixListener::bind(place.path("api")).unwrap());
    // Only the kernel is at fault, and the stale socket is gone at the end.
    start(&place, "api", &[]).end().assert_refused(&["kernel no-kernel"]);
}

#[test]
fn an_api_socket_that_is_a_file() {
    let place = Place::new();
    let file = place.given("api", "precious");
    let ended = start(&place, &file, &[]).end();
    ended.assert_refused(&[&file, "not a socket", "choose another path"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn an_api_socket_in_a_folder_that_does_not_exist() {
    let place = Place::new();
    let ended = start(&place, "/no/folder/api", &[]).end();
    ended.assert_refused(&["/no/folder/api", "No such file", "existing folder"]);
}

#[test]
fn an_api_socket_in_a_folder_that_may_not_be_written() {
    let place = Place::new();
    let ended = start(&place, "/etc/api", &[]).as_nobody().end();
    ended.assert_refused(&["/etc/api", "Permission denied", "you may write to"]);
}

#[test]
fn an_api_socket_with_too_long_a_path() {
    let place = Place::new();
    let path = place.path(&"x".repeat(120));
    start(&place, &path, &[]).end().assert_refused(&[&path, "at most 107 bytes"]);
}

#[test]
fn a_vsock_socket_of_a_living_vm() {
    let place = Place::new();
    let path = harness::artifacts::text(&place.given_path("vsock"));
    let listener = UnixListener::bind(&path).unwrap();
    let ended = start_with_kernel(&place, "api", &path);
    ended.assert_refused(&[&path, "in use"]);
    assert!(fs::exists(&path).unwrap(), "the socket of the other VM must stay");
    drop(listener);
}

#[test]
fn a_vsock_socket_that_is_a_file() {
    let place = Place::new();
    let file = place.given("vsock", "precious");
    start_with_kernel(&place, "api", &file).assert_refused(&[&file]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn a_vsock_socket_in_a_folder_that_does_not_exist() {
    let place = Place::new();
    start_with_kernel(&place, "api", "/no/folder/vsock").assert_refused(&["/no/folder/vsock"]);
}

#[test]
fn a_vsock_socket_with_too_long_a_path() {
    let place = Place::new();
    // Just short enough for itself, and for nothing that is added to it.
    let folder = place.path("");
    let api = format!("{folder}{}", "x".repeat(107 - folder.len()));
    let initrd = place.given("initrd", image::noise(5000, 1));
    let kernel = place.given("kernel", image::idle_kernel());
    let call = place.call(["start", "--kernel", &kernel, "--initrd", &initrd]);
    call.arguments(["--api-socket", &api]).end().assert_refused(&[&format!("{api}.vsock")]);
}

#[test]
fn one_path_for_both_sockets() {
    let place = Place::new();
    start_with_kernel(&place, "api", "api").assert_refused(&["api"]);
}

/// With a kernel that passes all checks, since the vsock device is made when that is loaded.
fn start_with_kernel(place: &Place, api: &str, vsock: &str) -> harness::Ended {
    let initrd = place.given("initrd", image::noise(5000, 1));
    let kernel = place.given("kernel", image::idle_kernel());
    let call = place.call(["start", "--kernel", &kernel, "--initrd", &initrd]);
    call.arguments(["--api-socket", api, "--vsock", vsock]).end()
}

#[test]
fn requests_to_a_vm_that_is_not_there() {
    let place = Place::new();
    for request in ["info", "metrics", "pause", "resume", "stop"] {
        let ended = place.call([request, "--api-socket", "/no/api"]).end();
        ended.assert_refused(&["no VM answers", "/no/api", "No such file", "cube-vmm start"]);
    }
}

#[test]
fn a_command_for_a_vm_that_is_not_there() {
    let place = Place::new();
    let ended = place.call(["exec", "--api-socket", "/no/api", "--", "true"]).end();
    ended.assert_refused(&["no VM answers", "/no/api", "cube-vmm start"]);
}

#[test]
fn a_request_to_a_vm_that_has_died() {
    let place = Place::new();
    let path = harness::artifacts::text(&place.given_path("api"));
    drop(UnixListener::bind(&path).unwrap());
    let ended = place.call(["info", "--api-socket", &path]).end();
    ended.assert_refused(&["no VM answers", &path, "Connection refused"]);
}

#[test]
fn a_request_to_something_that_is_no_vm() {
    let place = Place::new();
    let path = harness::artifacts::text(&place.given_path("api"));
    let listener = UnixListener::bind(&path).unwrap();
    let answer = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut peer, _) = listener.accept().unwrap();
        let _ = peer.read(&mut [0; 1024]);
        peer.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    });
    let ended = place.call(["info", "--api-socket", &path]).end();
    ended.assert_refused(&[&path, "does not understand"]);
    answer.join().unwrap();
}

#[test]
fn no_api_socket() {
    let place = Place::new();
    place.call(["start"]).end().assert_usage(&["--api-socket"]);
}
