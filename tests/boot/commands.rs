//! A command in the guest behaves as one on the host.

use harness::{Place, image, sh};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        the_exit_code_is_the_commands,
        standard_input_arrives_with_its_end,
        twenty_megabytes_come_back_as_they_went,
        standard_output_and_error_are_two,
        a_command_killed_by_a_signal_is_told_as_a_shell_would,
        a_command_that_does_not_exist_is_named,
        a_file_that_is_no_command_is_named,
        environment_folder_and_user_are_as_asked,
        arguments_arrive_as_they_are,
        a_command_needs_no_dashes_before_it,
        input_that_nobody_reads_is_no_obstacle,
        output_that_nobody_reads_ends_the_command,
        output_closed_early_does_not_hide_the_exit_code,
        a_child_in_the_background_does_not_hold_up_the_end,
    ]
}

fn the_exit_code_is_the_commands() {
    let place = Place::new();
    let ended = place.run(&[], sh("echo hello; exit 7")).end();
    assert_eq!(ended.output(7), "hello\n");
    assert_eq!(ended.stderr, "");
}

fn standard_input_arrives_with_its_end() {
    let place = Place::new();
    let ended = place.run(&[], ["wc", "-l"]).stdin("a\nb\n").end();
    assert_eq!(ended.output(0).trim(), "2");
}

fn twenty_megabytes_come_back_as_they_went() {
    let place = Place::new();
    let sent = image::noise(20_000_000, 11);
    let ended = place.run(&[], ["cat"]).stdin(sent.clone()).end();
    assert_eq!((ended.code, ended.stdout.len()), (0, sent.len()), "{}", ended.stderr);
    assert!(ended.stdout == sent, "the bytes differ");
}

fn standard_output_and_error_are_two() {
    let place = Place::new();
    let ended = place.run(&[], sh("echo one; echo two >&2")).end();
    assert_eq!((ended.output(0).as_str(), ended.stderr.as_str()), ("one\n", "two\n"));
}

fn a_command_killed_by_a_signal_is_told_as_a_shell_would() {
    let place = Place::new();
    let ended = place.run(&[], sh("kill -9 $$")).end();
    ended.output(137);
}

fn a_command_that_does_not_exist_is_named() {
    let place = Place::new();
    let ended = place.run(&[], ["nosuch", "word"]).end();
    assert_eq!(ended.output(127), "");
    assert!(ended.stderr.contains("nosuch"), "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
}

fn a_file_that_is_no_command_is_named() {
    let place = Place::new();
    let ended = place.run(&[], ["/etc/hosts"]).end();
    assert_eq!(ended.output(126), "");
    assert!(ended.stderr.contains("/etc/hosts"), "{ended:?}");
}

fn environment_folder_and_user_are_as_asked() {
    let place = Place::new();
    let options = ["-e", "COLOR=deep blue", "-e", "EMPTY=", "-w", "/etc", "-u", "12:34"];
    let line = "echo $COLOR/$EMPTY/$(pwd)/$(id -u)/$(id -g)";
    let ended = place.run(&options, sh(line)).end();
    assert_eq!(ended.output(0), "deep blue///etc/12/34\n");
}

fn arguments_arrive_as_they_are() {
    let place = Place::new();
    let words = ["two  spaces", "--memory", "", "$HOME", "ü\n", "--"];
    let ended = place.run(&[], ["printf", "<%s>"]).arguments(words).end();
    assert_eq!(ended.output(0), "<two  spaces><--memory><><$HOME><ü\n><-->");
}

fn a_command_needs_no_dashes_before_it() {
    let place = Place::new();
    let ended = place.call(["run", "--boot-timeout=300", "echo", "-n", "hello"]).end();
    assert_eq!(ended.output(0), "hello");
}

fn input_that_nobody_reads_is_no_obstacle() {
    let place = Place::new();
    let ended = place.run(&[], ["true"]).stdin(image::noise(1 << 20, 3)).end();
    assert_eq!(ended.output(0), "");
}

fn output_that_nobody_reads_ends_the_command() {
    let place = Place::new();
    // The reader takes one line and goes, which `yes` in the guest sees as a broken pipe.
    let script = "set -o pipefail; \"$@\" | head -n 1";
    let call = place.run(&[], ["yes"]).through(&["bash", "-c", script, "bash"]);
    assert_eq!(call.end().output(141), "y\n");
}

fn output_closed_early_does_not_hide_the_exit_code() {
    let place = Place::new();
    let ended = place.run(&[], sh("echo x; exec >&- 2>&-; exit 3")).end();
    assert_eq!(ended.output(3), "x\n");
}

fn a_child_in_the_background_does_not_hold_up_the_end() {
    let place = Place::new();
    let ended = place.run(&[], sh("sleep 100000 & echo done")).end();
    assert_eq!(ended.output(0), "done\n");
}
