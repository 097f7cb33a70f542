//! Values and usage.

use crate::run;
use harness::Place;

#[track_caller]
fn assert_memory_refused(size: &str, words: &[&str]) {
    let place = Place::new();
    let ended = run(&place, &["--memory", size]).end();
    ended.assert_refused(&[size]);
    ended.assert_refused(words);
}

#[test]
fn no_memory() {
    assert_memory_refused("0", &["too small", "at least 32M"]);
}

#[test]
fn a_kilobyte_of_memory() {
    assert_memory_refused("1K", &["too small", "at least 32M"]);
}

#[test]
fn more_memory_than_there_can_be() {
    assert_memory_refused("999T", &["too large", "the most is 4T"]);
}

#[test]
fn more_memory_than_a_number_holds() {
    assert_memory_refused("18446744073709551615T", &["the most is 4T"]);
}

#[test]
fn memory_that_is_no_number() {
    assert_memory_refused("abc", &["a number with a unit", "256M"]);
}

#[test]
fn memory_without_a_unit() {
    assert_memory_refused("256", &["a number with a unit", "256M"]);
}

#[test]
fn memory_that_is_nothing() {
    assert_memory_refused("", &["a number with a unit", "256M"]);
}

#[test]
fn memory_in_a_unit_with_more_bytes_than_letters() {
    assert_memory_refused("1\u{212a}", &["a number with a unit", "256M"]);
}

#[test]
fn memory_of_half_a_page() {
    assert_memory_refused("65537K", &["multiple of 4096", "megabytes"]);
}

#[test]
fn too_little_memory_for_the_kernel() {
    let place = Place::new();
    let mut kernel = harness::image::idle_kernel();
    // The memory size of the only segment: 64 MiB.
    kernel[64 + 40..64 + 48].copy_from_slice(&(64_u64 << 20).to_le_bytes());
    let kernel = place.given("large", kernel);
    let ended = crate::with_kernel(&place, &kernel, &["--memory", "32M"]).end();
    ended.assert_refused(&[&kernel, "use a larger --memory"]);
}

#[test]
fn more_memory_than_the_host_gives() {
    let place = Place::new();
    let ended = run(&place, &["--memory", "8G"]).limited("--as=4294967296").end();
    ended.assert_refused(&["bytes of guest memory", "use a smaller --memory"]);
}

#[test]
fn no_cpu() {
    let place = Place::new();
    run(&place, &["--cpus", "0"]).end().assert_refused(&["0 vCPUs", "use 1 to 32"]);
}

#[test]
fn a_thousand_cpus() {
    let place = Place::new();
    run(&place, &["--cpus", "1000"]).end().assert_refused(&["1000 vCPUs", "use 1 to 32"]);
}

#[test]
fn one_cpu_too_many() {
    let place = Place::new();
    run(&place, &["--cpus", "33"]).end().assert_refused(&["33 vCPUs", "use 1 to 32"]);
}

#[test]
fn cpus_that_are_no_number() {
    let place = Place::new();
    run(&place, &["--cpus", "four"]).end().assert_usage(&["'four'", "--cpus"]);
}

#[test]
fn a_command_line_that_is_too_long() {
    let place = Place::new();
    let ended = run(&place, &["--cmdline-append", &"x".repeat(3000)]).end();
    ended.assert_refused(&["the kernel takes 2047", "shorten --cmdline-append"]);
}

#[test]
fn a_command_line_of_two_lines() {
    let place = Place::new();
    let ended = run(&place, &["--cmdline-append", "one\ntwo"]).end();
    ended.assert_refused(&["control character '\\n'", "remove it"]);
}

#[test]
fn a_command_line_with_an_escape_sequence() {
    let place = Place::new();
    let ended = run(&place, &["--cmdline-append", "a\u{1b}[2J"]).end();
    ended.assert_refused(&["control character '\\u{1b}'", "remove it"]);
}

#[test]
fn a_limit_of_a_network_card_that_is_no_rate() {
    let place = Place::new();
    let ended = run(&place, &["--net", "tap=t,rx_bytes=5"]).end();
    ended.assert_refused(&["rate \"5\"", "10M/s"]);
}

#[test]
fn a_limit_that_nobody_would_keep() {
    let place = Place::new();
    for (net, words) in [
        ("tap=t,vhost=on,tx_frames=9/s", ["tx_frames=", "vhost=on"]),
        ("vhost-user=s,rx_bytes=5M/s", ["rx_bytes=", "vhost-user="]),
    ] {
        let ended = run(&place, &["--net", net]).end();
        ended.assert_refused(&[words[0], words[1], "leave one of them out"]);
    }
}

#[test]
fn a_network_card_without_its_backend() {
    let place = Place::new();
    let ended = run(&place, &["--net", "vhost-user=/nonexistent/socket"]).end();
    ended.assert_refused(&["/nonexistent/socket", "start the backend first"]);
}

#[test]
fn a_variable_without_a_value() {
    let place = Place::new();
    run(&place, &["--env", "HOME"]).end().assert_refused(&["\"HOME\"", "write NAME=VALUE"]);
}

#[test]
fn a_user_that_is_no_number() {
    let place = Place::new();
    run(&place, &["--user", "root"]).end().assert_refused(&["\"root\"", "UID:GID in numbers"]);
}

#[test]
fn a_boot_timeout_beyond_all_time() {
    let place = Place::new();
    let ended = run(&place, &["--boot-timeout", "18446744073709551615"]).end();
    ended.assert_usage(&["18446744073709551615", "--boot-timeout"]);
}

#[test]
fn an_option_that_does_not_exist() {
    let place = Place::new();
    run(&place, &["--memroy", "1G"]).end().assert_usage(&["'--memroy'", "--memory"]);
}

#[test]
fn a_protocol_that_does_not_exist() {
    let place = Place::new();
    run(&place, &["--boot-protocol", "bios"]).end().assert_usage(&["'bios'", "--boot-protocol"]);
}

#[test]
fn an_option_without_its_value() {
    let place = Place::new();
    place.call(["run", "--memory"]).end().assert_usage(&["--memory", "value"]);
}

#[test]
fn no_command() {
    let place = Place::new();
    place.call(["run", "--memory", "128M"]).end().assert_usage(&["<CMD>"]);
}

#[test]
fn a_command_and_no_agent_to_run_it() {
    let place = Place::new();
    run(&place, &["--no-agent"]).end().assert_usage(&["'--no-agent' cannot be used with"]);
}

#[test]
fn a_subcommand_that_does_not_exist() {
    let place = Place::new();
    place.call(["boot"]).end().assert_usage(&["'boot'"]);
}

#[test]
fn an_argument_that_is_not_text() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new();
    let call = place.call(["run", "--memory"]).arguments([OsStr::from_bytes(b"\xff\xfe")]);
    call.end().assert_usage(&["invalid UTF-8"]);
}

#[test]
fn a_share_without_a_directory() {
    let place = Place::new();
    let ended = run(&place, &["--fs", "tag=work"]).end();
    ended.assert_refused(&["tag=work", "path=DIR"]);
}

#[test]
fn two_shares_of_one_tag() {
    let place = Place::new();
    let ended = run(&place, &["--fs", "tag=work,path=/a", "--fs", "tag=work,path=/b"]).end();
    ended.assert_refused(&["\"work\"", "give each its own"]);
}

#[test]
fn a_share_with_a_tag_that_is_too_long() {
    let place = Place::new();
    let share = format!("tag={},path=/a", "x".repeat(37));
    let ended = run(&place, &["--fs", &share]).end();
    ended.assert_refused(&["is not usable", "1 to 36 bytes"]);
}
