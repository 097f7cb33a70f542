//! What CubeVMM takes for granted about `/dev/kvm`, shown with guests of twenty bytes.
//!
//! These run on every KVM, natively, be it one that interprets its guests. They use nothing of
//! CubeVMM: when they fail, the host is at fault, and no other test's failure means anything.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::sync::mpsc;
use std::thread;

use kvm_ioctls::IoEventAddress;
use vmm_sys_util::eventfd::EventFd;

#[path = "harness/tiny.rs"]
mod tiny;

use tiny::{CODE, Exit, Kick, Shape, TinyVm, next_exit, on_kvm, start_at, this_thread};

/// Where the guests that have more than one piece of code have the second one.
const SECOND: u16 = 0x8200;
/// Physical address of the MMIO accesses: segment 0xd000, where no memory is.
const MMIO: u64 = 0xd_0000;

#[test]
fn a_port_write_exits_with_its_port_and_data() {
    on_kvm(|kvm| {
        // mov al, 0x42; out 0x80, al; hlt
        let mut vm = TinyVm::new(&kvm, &Shape::default(), b"\xb0\x42\xe6\x80\xf4");
        assert_eq!(vm.run(), Exit::Out(0x80, vec![0x42]));
        assert_eq!(vm.run(), Exit::Halt);
    });
}

#[test]
fn a_wide_port_write_has_all_its_bytes() {
    on_kvm(|kvm| {
        // mov eax, 0x12345678; mov dx, 0x1000; out dx, eax; hlt
        let code = b"\x66\xb8\x78\x56\x34\x12\xba\x00\x10\x66\xef\xf4";
        let mut vm = TinyVm::new(&kvm, &Shape::default(), code);
        assert_eq!(vm.run(), Exit::Out(0x1000, vec![0x78, 0x56, 0x34, 0x12]));
        assert_eq!(vm.run(), Exit::Halt);
    });
}

#[test]
fn a_port_read_gives_the_guest_what_the_host_answers() {
    on_kvm(|kvm| {
        // in al, 0x60; out 0x80, al; hlt
        let mut vm = TinyVm::new(&kvm, &Shape::default(), b"\xe4\x60\xe6\x80\xf4");
        assert_eq!(vm.run_with(&[0x5a]), Exit::In(0x60, 1));
        assert_eq!(vm.run(), Exit::Out(0x80, vec![0x5a]));
        assert_eq!(vm.run(), Exit::Halt);
    });
}

#[test]
fn an_access_beyond_memory_exits_as_mmio() {
    on_kvm(|kvm| {
        // mov ax, 0xd000; mov ds, ax; mov byte [0x10], 0x42; mov al, [0x20]; out 0x80, al; hlt
        let code = b"\xb8\x00\xd0\x8e\xd8\xc6\x06\x10\x00\x42\xa0\x20\x00\xe6\x80\xf4";
        let mut vm = TinyVm::new(&kvm, &Shape::default(), code);
        assert_eq!(vm.run(), Exit::MmioWrite(MMIO + 0x10, vec![0x42]));
        assert_eq!(vm.run_with(&[0x5a]), Exit::MmioRead(MMIO + 0x20, 1));
        assert_eq!(vm.run(), Exit::Out(0x80, vec![0x5a]));
        assert_eq!(vm.run(), Exit::Halt);
    });
}

#[test]
fn what_the_guest_writes_is_in_the_hosts_memory() {
    on_kvm(|kvm| {
        // mov byte [0x3000], 0x42; hlt
        let mut vm = TinyVm::new(&kvm, &Shape::default(), b"\xc6\x06\x00\x30\x42\xf4");
        assert_eq!(vm.run(), Exit::Halt);
        assert_eq!(vm.byte(0x3000), 0x42);
    });
}

#[test]
fn the_reboot_port_exits() {
    on_kvm(|kvm| {
        // mov al, 0xfe; out 0x64, al; hlt
        let mut vm = TinyVm::new(&kvm, &Shape::default(), b"\xb0\xfe\xe6\x64\xf4");
        assert_eq!(vm.run(), Exit::Out(0x64, vec![0xfe]));
    });
}

#[test]
fn a_fault_that_cannot_be_delivered_is_a_shutdown() {
    on_kvm(|kvm| {
        // ud2
        let mut vm = TinyVm::new(&kvm, &Shape::default(), b"\x0f\x0b");
        tiny::without_descriptors(&vm.vcpus[0]);
        assert_eq!(vm.run(), Exit::Shutdown);
    });
}

/// Vector of line 4 once the guest below has set up the interrupt controller.
const LINE_4: u8 = 0x24;

/// Sets up the interrupt controller (8259A: ICW1 to ICW4 and the mask), says 'r' and halts for ever.
#[rustfmt::skip]
const AWAIT_INTERRUPTS: &[u8] = &[
    0xb0, 0x11, 0xe6, 0x20, // mov al, 0x11; out 0x20, al   cascade, ICW4 follows
    0xb0, 0x20, 0xe6, 0x21, // mov al, 0x20; out 0x21, al   vectors from 0x20
    0xb0, 0x04, 0xe6, 0x21, // mov al, 4; out 0x21, al      second controller on line 2
    0xb0, 0x01, 0xe6, 0x21, // mov al, 1; out 0x21, al      8086 mode
    0xb0, 0x00, 0xe6, 0x21, // mov al, 0; out 0x21, al      all lines unmasked
    0xb0, b'r', 0xe6, 0x80, // mov al, 'r'; out 0x80, al
    0xfb, 0xf4, 0xeb, 0xfd, // sti; hlt; jmp hlt
];

/// Says 'i' and ends the interrupt: mov al, 'i'; out 0x80, al; mov al, 0x20; out 0x20, al; iret
const ON_INTERRUPT: &[u8] = b"\xb0i\xe6\x80\xb0\x20\xe6\x20\xcf";

fn machine_with_line_4(kvm: &kvm_ioctls::Kvm) -> (TinyVm, EventFd) {
    let shape = Shape { irqchip: true, ..Shape::default() };
    let vm = TinyVm::new(kvm, &shape, AWAIT_INTERRUPTS);
    vm.load(SECOND, ON_INTERRUPT);
    vm.set_vector(LINE_4, SECOND);
    let line = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    vm.vm.register_irqfd(&line, 4).unwrap();
    (vm, line)
}

#[test]
fn an_irqfd_interrupts_the_guest() {
    on_kvm(|kvm| {
        let (mut vm, line) = machine_with_line_4(&kvm);
        assert_eq!(vm.run(), Exit::Out(0x80, vec![b'r']));
        line.write(1).unwrap();
        assert_eq!(vm.run(), Exit::Out(0x80, vec![b'i']));
    });
}

#[test]
fn an_irqfd_wakes_the_halted_guest_from_another_thread_every_time() {
    on_kvm(|kvm| {
        let (mut vm, line) = machine_with_line_4(&kvm);
        assert_eq!(vm.run(), Exit::Out(0x80, vec![b'r']));
        let (raise, raised) = mpsc::channel();
        let device = thread::spawn(move || raised.iter().for_each(|()| line.write(1).unwrap()));
        for _ in 0..100 {
            raise.send(()).unwrap();
            assert_eq!(vm.run(), Exit::Out(0x80, vec![b'i']));
        }
        drop(raise);
        device.join().unwrap();
    });
}

#[test]
fn a_masked_line_does_not_interrupt() {
    on_kvm(|kvm| {
        let (mut vm, line) = machine_with_line_4(&kvm);
        // Instead of halting with interrupts on: mask all lines, sti, nop, say 'n', halt.
        vm.load(CODE + 24, b"\xb0\xff\xe6\x21\xfb\x90\xb0n\xe6\x80\xf4");
        assert_eq!(vm.run(), Exit::Out(0x80, vec![b'r']));
        line.write(1).unwrap();
        assert_eq!(vm.run(), Exit::Out(0x80, vec![b'n']));
    });
}

#[test]
fn an_ioeventfd_swallows_the_port_write_that_matches() {
    on_kvm(|kvm| {
        // mov al, 0x42; out 0x80, al; mov al, 0x43; out 0x80, al; hlt
        let code = b"\xb0\x42\xe6\x80\xb0\x43\xe6\x80\xf4";
        let mut vm = TinyVm::new(&kvm, &Shape::default(), code);
        let kicked = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        vm.vm.register_ioevent(&kicked, &IoEventAddress::Pio(0x80), 0x42_u8).unwrap();
        assert_eq!(vm.run(), Exit::Out(0x80, vec![0x43]));
        assert_eq!(kicked.read().unwrap(), 1);
        assert_eq!(vm.run(), Exit::Halt);
        assert!(kicked.read().is_err());
    });
}

#[test]
fn an_ioeventfd_swallows_the_mmio_write_that_matches() {
    on_kvm(|kvm| {
        // mov ax, 0xd000; mov ds, ax; mov word [0x50], 1; mov word [0x50], 0; hlt
        let code = b"\xb8\x00\xd0\x8e\xd8\xc7\x06\x50\x00\x01\x00\xc7\x06\x50\x00\x00\x00\xf4";
        let mut vm = TinyVm::new(&kvm, &Shape::default(), code);
        let kicked = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let address = IoEventAddress::Mmio(MMIO + 0x50);
        vm.vm.register_ioevent(&kicked, &address, 1_u16).unwrap();
        assert_eq!(vm.run(), Exit::MmioWrite(MMIO + 0x50, vec![0, 0]));
        assert_eq!(kicked.read().unwrap(), 1);
        assert_eq!(vm.run(), Exit::Halt);
    });
}

/// mov al, [0x4000]; mov [0x3000], al; mov [0x5fff], al; mov [0x9000], al; hlt
const WRITES_PAGES_3_5_9: &[u8] = b"\xa0\x00\x40\xa2\x00\x30\xa2\xff\x5f\xa2\x00\x90\xf4";
/// Offset of its third write.
const WRITE_OF_PAGE_9: u16 = 9;

const LOGGED: Shape = Shape { dirty_log: true, irqchip: false, vcpus: 1 };

/// Runs the whole guest and forgets what it wrote.
///
/// When it maps a page for a guest that only reads, KVM may map it writable and report it then.
/// From the second time on, the log is exact.
fn run_once(vm: &mut TinyVm) {
    assert_eq!(vm.run(), Exit::Halt);
    vm.dirty_pages();
    start_at(&vm.vcpus[0], CODE);
}

#[test]
fn a_fresh_guest_has_dirtied_nothing() {
    on_kvm(|kvm| {
        let vm = TinyVm::new(&kvm, &LOGGED, WRITES_PAGES_3_5_9);
        assert_eq!(vm.dirty_pages(), [0_usize; 0]);
    });
}

#[test]
fn the_first_dirty_log_has_every_page_that_was_written() {
    on_kvm(|kvm| {
        let mut vm = TinyVm::new(&kvm, &LOGGED, WRITES_PAGES_3_5_9);
        assert_eq!(vm.run(), Exit::Halt);
        let pages = vm.dirty_pages();
        assert!([3, 5, 9].iter().all(|page| pages.contains(page)), "{pages:?}");
    });
}

#[test]
fn the_dirty_log_has_exactly_the_pages_that_were_written() {
    on_kvm(|kvm| {
        let mut vm = TinyVm::new(&kvm, &LOGGED, WRITES_PAGES_3_5_9);
        run_once(&mut vm);
        assert_eq!(vm.run(), Exit::Halt);
        assert_eq!(vm.dirty_pages(), [3, 5, 9]);
        assert_eq!(vm.dirty_pages(), [0_usize; 0]);
        start_at(&vm.vcpus[0], CODE + WRITE_OF_PAGE_9);
        assert_eq!(vm.run(), Exit::Halt);
        assert_eq!(vm.dirty_pages(), [9]);
    });
}

#[test]
fn a_write_that_crosses_a_page_dirties_both() {
    on_kvm(|kvm| {
        // mov [0x3fff], ax; hlt
        let mut vm = TinyVm::new(&kvm, &LOGGED, b"\xa3\xff\x3f\xf4");
        run_once(&mut vm);
        assert_eq!(vm.run(), Exit::Halt);
        assert_eq!(vm.dirty_pages(), [3, 4]);
    });
}

#[test]
fn immediate_exit_comes_before_the_first_instruction() {
    on_kvm(|kvm| {
        // mov al, 0x42; out 0x80, al; hlt
        let mut vm = TinyVm::new(&kvm, &Shape::default(), b"\xb0\x42\xe6\x80\xf4");
        let kick = Kick::new(&vm, 0);
        kick.set_immediate_exit(1);
        assert_eq!(vm.run(), Exit::Failed(libc::EINTR));
        assert_eq!(vm.vcpus[0].get_regs().unwrap().rip, u64::from(CODE));
        kick.set_immediate_exit(0);
        assert_eq!(vm.run(), Exit::Out(0x80, vec![0x42]));
    });
}

#[test]
fn a_kick_stops_a_guest_that_never_exits() {
    on_kvm(|kvm| {
        // mov al, 's'; out 0x80, al; jmp to itself
        let mut vm = TinyVm::new(&kvm, &Shape::default(), b"\xb0s\xe6\x80\xeb\xfe");
        let kick = Kick::new(&vm, 0);
        let (spins, spinning) = mpsc::channel();
        let end = thread::scope(|scope| {
            let runner = scope.spawn(|| {
                assert_eq!(vm.run(), Exit::Out(0x80, vec![b's']));
                spins.send(this_thread()).unwrap();
                vm.run()
            });
            kick.stop(spinning.recv().unwrap());
            runner.join().unwrap()
        });
        assert_eq!(end, Exit::Failed(libc::EINTR));
        assert_eq!(vm.vcpus[0].get_regs().unwrap().rip, u64::from(CODE) + 4);
    });
}

#[test]
fn two_vcpus_share_memory() {
    on_kvm(|kvm| {
        let shape = Shape { vcpus: 2, ..Shape::default() };
        // mov byte [0x3000], 1; wait: cmp byte [0x3001], 1; jne wait; mov al, 'a'; out 0x80, al
        let first = b"\xc6\x06\x00\x30\x01\x80\x3e\x01\x30\x01\x75\xf9\xb0a\xe6\x80";
        // wait: cmp byte [0x3000], 1; jne wait; mov byte [0x3001], 1; mov al, 'b'; out 0x80, al
        let second = b"\x80\x3e\x00\x30\x01\x75\xf9\xc6\x06\x01\x30\x01\xb0b\xe6\x80";
        let mut vm = TinyVm::new(&kvm, &shape, first);
        vm.load(SECOND, second);
        start_at(&vm.vcpus[1], SECOND);
        let exits: Vec<Exit> = thread::scope(|scope| {
            let run = |vcpu| scope.spawn(move || next_exit(vcpu, &[]));
            let threads: Vec<_> = vm.vcpus.iter_mut().map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(exits, [Exit::Out(0x80, vec![b'a']), Exit::Out(0x80, vec![b'b'])]);
    });
}
