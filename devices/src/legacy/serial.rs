//! The serial port: vm-superio's 16550A behind eight one-byte ports.
//!
//! What the guest writes goes to a sink that must not block (an open `O_NONBLOCK` descriptor, a
//! bounded ring): the write happens on the vCPU thread. A byte that the sink refuses is counted in
//! [`Serial::lost_output`] and gone, as on a real line without flow control. Input is bounded by
//! the receive FIFO; [`Serial::enqueue_input`] says how much it took.

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::mem;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};
use vm_superio::Trigger;
use vm_superio::serial::{SerialEvents, SerialState as UartState};

use super::{byte, byte_mut};
use crate::bus::{AccessError, BusDevice};
use crate::event::Event;
use crate::ids::Gsi;
use crate::irq::Interrupt;
use crate::metrics::{Count, Meter, Metered, Metric};
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

/// First port of COM1.
pub const COM1_PORT: u16 = 0x3f8;
/// Interrupt of COM1.
pub const COM1_GSI: Gsi = Gsi(4);
/// Ports taken.
pub const LEN: u64 = 8;
/// Bytes of the receive FIFO.
pub const FIFO_SIZE: usize = 64;

const INTERRUPT_THR_EMPTY: u8 = 0b0010;
const IIR_NONE: u8 = 0b0001;
const IIR_THR_EMPTY: u8 = 0b0010;
const IIR_DATA: u8 = 0b0100;
const INTERRUPT_BITS: u8 = 0b1111;
const LINE_DATA_READY: u8 = 0b0001;

// --- device ------------------------------------------------------------------------------------

/// The interrupt line, which can be held back while a state is applied.
struct Line {
    interrupt: Interrupt,
    held: Cell<bool>,
}

impl Trigger for Line {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        if !self.held.get() {
            self.interrupt.raise();
        }
        Ok(())
    }
}

/// What the UART tells of itself; outlives the UART, which a restore replaces.
#[derive(Default)]
struct Events {
    printed: Count,
    lost: Count,
    typed: Count,
    drained: OnceLock<Event>,
}

impl SerialEvents for Events {
    fn buffer_read(&self) {}
    fn out_byte(&self) {
        self.printed.one();
    }
    fn tx_lost_byte(&self) {
        self.lost.one();
    }
    fn in_buffer_empty(&self) {
        if let Some(drained) = self.drained.get() {
            drained.signal();
        }
    }
}

impl Metered for Events {
    fn metrics(&self) -> Vec<Metric> {
        let lost = "Bytes of the guest's that the output refused";
        vec![
            Metric::counter(
                "serial_printed_bytes_total",
                "Bytes that the guest printed",
                self.printed.get(),
            ),
            Metric::counter("serial_lost_bytes_total", lost, self.lost.get()),
            Metric::counter(
                "serial_typed_bytes_total",
                "Bytes given to the guest",
                self.typed.get(),
            ),
        ]
    }
}

type Output = Box<dyn io::Write + Send>;
type Uart = vm_superio::Serial<Line, Arc<Events>, Output>;

/// A 16550A serial port.
pub struct Serial(Uart);

impl Serial {
    /// A port that raises `interrupt` and sends what the guest writes to `output`, which must not
    /// block.
    pub fn new(interrupt: Interrupt, output: Output) -> Self {
        let line = Line { interrupt, held: Cell::new(false) };
        Self(Uart::with_events(line, Arc::default(), output))
    }

    /// From now on `drained` is signalled each time the guest reads and leaves no input behind, so
    /// that whoever feeds the port can wait for room. The first event given stays.
    pub fn set_drained_event(&self, drained: Event) {
        let _ = self.0.events().drained.set(drained);
    }

    /// Gives the guest as much of `input` as its FIFO has room for; how many bytes that was. The
    /// rest is the caller's, to be offered again. In loopback mode the line is cut: nothing is
    /// taken.
    pub fn enqueue_input(&mut self, input: &[u8]) -> usize {
        // A full FIFO is the only error there is.
        let taken = self.0.enqueue_raw_bytes(input).unwrap_or(0);
        self.0.events().typed.add(taken as u64);
        taken
    }

    /// Bytes that the output refused.
    pub fn lost_output(&self) -> u64 {
        self.0.events().lost.get()
    }

    /// What it has printed, lost and been given; goes on through a restore.
    pub fn meter(&self) -> Meter {
        self.0.events().clone()
    }

    /// Once after a restore, when the interrupt controller is in place and before the vCPUs run:
    /// raises the interrupt that the guest may be waiting for.
    pub fn resume(&mut self) {
        if self.0.state().interrupt_identification & (IIR_THR_EMPTY | IIR_DATA) != 0 {
            self.0.interrupt_evt().interrupt.raise();
        }
    }
}

fn register(offset: u64) -> Result<u8, AccessError> {
    match u8::try_from(offset) {
        Ok(register) if offset < LEN => Ok(register),
        _ => Err(AccessError::NoRegister(offset)),
    }
}

impl BusDevice for Serial {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        *byte_mut(offset, data)? = self.0.read(register(offset)?);
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        // The only error is that of the output, which was counted; the guest goes on.
        let _ = self.0.write(register(offset)?, byte(offset, data)?);
        Ok(())
    }
}

// --- state -------------------------------------------------------------------------------------

/// The saved registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialState {
    baud_divisor: [u8; 2],
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    input: Vec<u8>,
}

impl Schema for SerialState {
    const KIND: &'static str = "serial";
    const VERSION: u32 = 1;
}

impl Snapshot for Serial {
    type State = SerialState;

    fn save(&self) -> Result<SerialState, SaveError> {
        let uart = self.0.state();
        Ok(SerialState {
            baud_divisor: [uart.baud_divisor_low, uart.baud_divisor_high],
            interrupt_enable: uart.interrupt_enable,
            interrupt_identification: uart.interrupt_identification,
            line_control: uart.line_control,
            line_status: uart.line_status,
            modem_control: uart.modem_control,
            modem_status: uart.modem_status,
            scratch: uart.scratch,
            input: uart.in_buffer,
        })
    }

    /// Raises no interrupt: [`Serial::resume`] does. Output that was in flight is at its sink
    /// already, so the transmitter is empty, and a guest that waits to hear so will.
    fn restore(&mut self, state: SerialState) -> Result<(), RestoreError> {
        let invalid = |field, value: String| {
            Err(RestoreError::Invalid { kind: SerialState::KIND, field, value })
        };
        if state.input.len() > FIFO_SIZE {
            return invalid("input", format!("of {} bytes", state.input.len()));
        }
        if state.interrupt_enable & !INTERRUPT_BITS != 0 {
            return invalid("interrupt_enable", format!("{:#x}", state.interrupt_enable));
        }
        let pending = state.interrupt_identification;
        if pending != IIR_NONE && (pending == 0 || pending & !(IIR_THR_EMPTY | IIR_DATA) != 0) {
            return invalid("interrupt_identification", format!("{pending:#x}"));
        }
        let line = Line { interrupt: self.0.interrupt_evt().interrupt.clone(), held: true.into() };
        let sink: Output = Box::new(io::sink());
        let uart = Uart::from_state(&state.into_uart(), line, self.0.events().clone(), sink);
        let Ok(mut uart) = uart else {
            return invalid("input", "refused".to_owned());
        };
        uart.interrupt_evt().held.set(false);
        mem::swap(uart.writer_mut(), self.0.writer_mut());
        self.0 = uart;
        Ok(())
    }
}

impl SerialState {
    fn into_uart(self) -> UartState {
        let ready = if self.input.is_empty() { 0 } else { LINE_DATA_READY };
        let waits = self.interrupt_enable & INTERRUPT_THR_EMPTY != 0;
        let pending = self.interrupt_identification;
        UartState {
            baud_divisor_low: self.baud_divisor[0],
            baud_divisor_high: self.baud_divisor[1],
            interrupt_enable: self.interrupt_enable,
            interrupt_identification: if waits {
                pending & !IIR_NONE | IIR_THR_EMPTY
            } else {
                pending
            },
            line_control: self.line_control,
            line_status: self.line_status & !LINE_DATA_READY | ready,
            modem_control: self.modem_control,
            modem_status: self.modem_status,
            scratch: self.scratch,
            in_buffer: self.input,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::snapshot::Stateful;

    const DATA: u64 = 0;
    const ENABLE: u64 = 1;
    const IDENTIFICATION: u64 = 2;
    const MODEM_CONTROL: u64 = 4;
    const LINE_STATUS: u64 = 5;
    const SCRATCH: u64 = 7;

    #[derive(Clone, Default)]
    struct Terminal(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Terminal {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(data);
            Ok(data.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Stalled;

    impl io::Write for Stalled {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::WouldBlock.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn counted() -> (Interrupt, Arc<AtomicU32>) {
        let count = Arc::new(AtomicU32::new(0));
        let counted = count.clone();
        let line = Interrupt::from_fn(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        (line, count)
    }

    fn port() -> (Serial, Terminal, Arc<AtomicU32>) {
        let terminal = Terminal::default();
        let (line, count) = counted();
        (Serial::new(line, Box::new(terminal.clone())), terminal, count)
    }

    fn read(serial: &mut Serial, offset: u64) -> u8 {
        let mut data = [0];
        serial.read(offset, &mut data).unwrap();
        data[0]
    }

    #[test]
    fn output_reaches_the_sink_in_order() {
        let (mut serial, terminal, _) = port();
        for byte in b"hello" {
            serial.write(DATA, &[*byte]).unwrap();
        }
        assert_eq!(*terminal.0.lock().unwrap(), b"hello");
        assert_eq!(serial.lost_output(), 0);
    }

    #[test]
    fn h33_a_stalled_sink_costs_bytes_and_nothing_else() {
        let (line, count) = counted();
        let mut serial = Serial::new(line, Box::new(Stalled));
        serial.write(ENABLE, &[INTERRUPT_THR_EMPTY]).unwrap();
        read(&mut serial, IDENTIFICATION);
        serial.write(DATA, b"x").unwrap();
        assert_eq!(serial.lost_output(), 1);
        assert_eq!(count.load(Ordering::Relaxed), 2);
        assert_eq!(read(&mut serial, LINE_STATUS), 0x60);
    }

    #[test]
    fn h33_input_is_bounded_by_the_fifo_and_the_rest_is_reported() {
        let (mut serial, _, _) = port();
        assert_eq!(serial.enqueue_input(&[7; 100]), FIFO_SIZE);
        assert_eq!(serial.enqueue_input(&[7]), 0);
        assert_eq!(read(&mut serial, DATA), 7);
        assert_eq!(serial.enqueue_input(&[8, 9]), 1);
    }

    #[test]
    fn bytes_are_counted_through_a_restore() {
        let (mut serial, _, _) = port();
        let meter = serial.meter();
        let state = serial.save().unwrap();
        serial.write(DATA, b"x").unwrap();
        assert_eq!(serial.enqueue_input(b"abc"), 3);
        serial.restore(state).unwrap();
        serial.write(DATA, b"y").unwrap();
        let counts: Vec<u64> = meter.metrics().iter().map(|metric| metric.value).collect();
        assert_eq!(counts, [2, 0, 3]);
        let mut stalled = Serial::new(counted().0, Box::new(Stalled));
        let meter = stalled.meter();
        stalled.write(DATA, b"x").unwrap();
        assert_eq!(meter.metrics()[1].value, 1);
    }

    #[test]
    fn input_raises_the_interrupt_and_draining_it_the_event() {
        let (mut serial, _, count) = port();
        let drained = Event::new().unwrap();
        serial.set_drained_event(drained.clone());
        serial.write(ENABLE, &[1]).unwrap();
        serial.enqueue_input(b"ab");
        assert_eq!(count.load(Ordering::Relaxed), 1);
        assert_eq!(read(&mut serial, DATA), b'a');
        assert_eq!(drained.clear(), 0);
        assert_eq!(read(&mut serial, DATA), b'b');
        assert_eq!(drained.clear(), 1);
    }

    #[test]
    fn loopback_takes_no_input() {
        let (mut serial, _, _) = port();
        serial.write(MODEM_CONTROL, &[0x10]).unwrap();
        assert_eq!(serial.enqueue_input(b"a"), 0);
    }

    #[test]
    fn wide_accesses_and_ninth_ports_are_refused() {
        let (mut serial, terminal, _) = port();
        let bad_size = Err(AccessError::BadSize { offset: 0, len: 4 });
        assert_eq!(serial.write(0, &[0; 4]), bad_size);
        assert_eq!(serial.read(0, &mut [0; 4]), bad_size);
        assert_eq!(serial.write(8, &[0]), Err(AccessError::NoRegister(8)));
        assert_eq!(serial.read(1 << 32, &mut [0]), Err(AccessError::NoRegister(1 << 32)));
        assert!(terminal.0.lock().unwrap().is_empty());
    }

    #[test]
    fn a_restored_port_has_registers_input_and_its_own_sink() {
        let (mut saved, _, _) = port();
        saved.write(SCRATCH, &[0x5a]).unwrap();
        saved.enqueue_input(b"abc");
        let record = saved.save_record().unwrap();
        let (mut restored, terminal, _) = port();
        restored.restore_record(record.clone()).unwrap();
        assert_eq!(restored.save_record().unwrap(), record);
        assert_eq!(read(&mut restored, SCRATCH), 0x5a);
        assert_eq!(read(&mut restored, LINE_STATUS), 0x61);
        assert_eq!(read(&mut restored, DATA), b'a');
        restored.write(DATA, b"z").unwrap();
        assert_eq!(*terminal.0.lock().unwrap(), b"z");
    }

    #[test]
    fn a_waiting_transmitter_is_told_after_a_restore_and_not_during_it() {
        let (mut saved, _, _) = port();
        saved.write(ENABLE, &[INTERRUPT_THR_EMPTY]).unwrap();
        // The guest has seen the interrupt and sent a byte; the next edge was lost with the host.
        read(&mut saved, IDENTIFICATION);
        let state = saved.save().unwrap();
        let (mut restored, _, count) = port();
        restored.restore(state).unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 0);
        restored.resume();
        assert_eq!(count.load(Ordering::Relaxed), 1);
        assert_eq!(read(&mut restored, IDENTIFICATION), 0xc0 | IIR_THR_EMPTY);
    }

    #[test]
    fn a_port_that_waits_for_nothing_resumes_silently() {
        let (mut serial, _, count) = port();
        serial.resume();
        assert_eq!(count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn impossible_states_are_refused() {
        let (mut serial, _, _) = port();
        let good = serial.save().unwrap();
        let long = SerialState { input: vec![0; FIFO_SIZE + 1], ..good.clone() };
        let enable = SerialState { interrupt_enable: 0x10, ..good.clone() };
        let pending = SerialState { interrupt_identification: 0, ..good.clone() };
        for bad in [long, enable, pending] {
            assert!(matches!(serial.restore(bad), Err(RestoreError::Invalid { .. })));
        }
        assert_eq!(serial.save().unwrap(), good);
    }
}
