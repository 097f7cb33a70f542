//! `cube-vmm run` on a terminal.

use harness::terminal::Terminal;
use harness::{Place, sh};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_command_on_a_terminal_has_one_of_that_size,
        a_resize_reaches_the_command,
        control_c_goes_to_the_command,
        the_terminal_is_as_before_afterwards,
        input_from_elsewhere_means_no_terminal,
    ]
}

fn a_command_on_a_terminal_has_one_of_that_size() {
    let place = Place::new();
    let line = "stty size; tty | grep -c /dev/; echo $TERM; test -t 2 && echo all";
    let call = place.run(&[], sh(line)).env("TERM", "vt220");
    let terminal = Terminal::call(call, 31, 97);
    assert_eq!(terminal.end().output(0), "31 97\r\n1\r\nvt220\r\nall\r\n");
}

fn a_resize_reaches_the_command() {
    let place = Place::new();
    let line = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.1; done";
    let terminal = Terminal::call(place.run(&[], sh(line)), 24, 80);
    terminal.screen().wait_for("ready");
    terminal.resize(7, 8);
    assert_eq!(terminal.end().output(0), "ready\r\n7 8\r\n");
}

fn control_c_goes_to_the_command() {
    let place = Place::new();
    let line = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.1; done";
    let mut terminal = Terminal::call(place.run(&[], sh(line)), 24, 80);
    terminal.screen().wait_for("ready");
    terminal.type_in(b"\x03");
    let ended = terminal.end();
    assert!(ended.output(9).contains("caught"), "{ended:?}");
}

fn the_terminal_is_as_before_afterwards() {
    let place = Place::new();
    let line = "echo ready; read word; echo got $word";
    let mut terminal = Terminal::call(place.run(&[], sh(line)), 24, 80);
    terminal.screen().wait_for("ready\r\n");
    let raw = !terminal.echoes();
    terminal.type_in(b"hello\r");
    let (ended, echoes) = terminal.end_with_echo();
    assert_eq!(ended.output(0), "ready\r\nhello\r\ngot hello\r\n");
    assert_eq!((raw, echoes), (true, true));
}

fn input_from_elsewhere_means_no_terminal() {
    let place = Place::new();
    let line = "test -t 1 || echo none; cat";
    let ended = place.run(&[], sh(line)).stdin("piped\n").end();
    assert_eq!(ended.output(0), "none\npiped\n");
}
