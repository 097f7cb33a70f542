//! Measures several things in turn (A B, B A, A B, …), so that what the host does meanwhile hits all
//! alike, and so does what the one before has left to be cleaned up.

use crate::report::{Row, Samples};

/// Rounds before the measured ones: they fill the page cache and load modules.
pub const UNMEASURED: usize = 2;
/// One that has failed this often is not tried again.
const HOPELESS: usize = 3;

/// What one attempt has shown, in nanoseconds since just before the process was started.
#[derive(Clone, Debug, Default)]
pub struct Trial {
    /// When the process had ended.
    pub ended: u64,
    /// Names of what was reached, and when, in order.
    pub marks: Vec<(String, u64)>,
}

/// Something that is measured.
pub struct Entrant<'a> {
    /// Its name in the tables.
    pub name: String,
    /// Makes one attempt.
    pub attempt: Box<dyn Fn() -> anyhow::Result<Trial> + 'a>,
}

/// Everything that was seen of one entrant.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Its name.
    pub name: String,
    trials: Vec<Trial>,
    failures: Vec<String>,
}

impl Record {
    /// Of an entrant that has done nothing yet.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// From the start to this mark.
    pub fn to_mark(&self, mark: &str) -> Samples {
        self.trials.iter().filter_map(|trial| at(trial, mark)).collect()
    }

    /// From one mark to another.
    pub fn between(&self, from: &str, to: &str) -> Samples {
        let step = |trial| Some(at(trial, to)?.saturating_sub(at(trial, from)?));
        self.trials.iter().filter_map(step).collect()
    }

    /// From the start to the end of the process.
    pub fn to_end(&self) -> Samples {
        self.trials.iter().map(|trial| trial.ended).collect()
    }

    /// All marks, in the order of the first attempt that reached the most.
    pub fn marks(&self) -> Vec<&str> {
        let fullest = self.trials.iter().rev().max_by_key(|trial| trial.marks.len());
        let marks = fullest.map(|trial| trial.marks.as_slice()).unwrap_or_default();
        marks.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// A row of these samples with this entrant's name and failures.
    pub fn row(&self, samples: &Samples) -> Row {
        Row::new(&self.name, samples).with_failures(&self.failures)
    }

    /// A row for each mark, as time since the start, and one for the end.
    pub fn ladder(&self) -> Vec<Row> {
        let row = |mark: &str| Row::new(mark, &self.to_mark(mark));
        let mut rows: Vec<Row> = self.marks().into_iter().map(row).collect();
        rows.push(Row::new("end of the process", &self.to_end()));
        rows
    }
}

fn at(trial: &Trial, mark: &str) -> Option<u64> {
    trial.marks.iter().find(|(name, _)| name == mark).map(|(_, time)| *time)
}

/// Runs all entrants `runs` times in turn, after [`UNMEASURED`] rounds. `progress` hears of each
/// measured round.
pub fn measure(entrants: &[Entrant], runs: usize, progress: impl Fn(usize)) -> Vec<Record> {
    let mut records: Vec<Record> =
        entrants.iter().map(|entrant| Record::new(&entrant.name)).collect();
    for round in 0..UNMEASURED + runs {
        if let Some(measured) = round.checked_sub(UNMEASURED) {
            progress(measured + 1);
        }
        for index in turn(round, entrants.len()) {
            let (entrant, record) = (&entrants[index], &mut records[index]);
            if record.failures.len() >= HOPELESS {
                continue;
            }
            match (entrant.attempt)() {
                Ok(trial) if round >= UNMEASURED => record.trials.push(trial),
                Ok(_) => {}
                Err(error) => record.failures.push(format!("{error:#}")),
            }
        }
    }
    records
}

/// The order of a round: forwards and backwards by turns.
fn turn(round: usize, entrants: usize) -> Vec<usize> {
    if round.is_multiple_of(2) { (0..entrants).collect() } else { (0..entrants).rev().collect() }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use anyhow::bail;

    use super::*;

    fn trial(marks: &[(&str, u64)], ended: u64) -> Trial {
        let marks = marks.iter().map(|(name, time)| ((*name).to_owned(), *time)).collect();
        Trial { ended, marks }
    }

    fn median(samples: &Samples) -> Option<u64> {
        samples.summary().map(|summary| summary.p50)
    }

    #[test]
    fn entrants_take_turns() {
        let order = RefCell::new(String::new());
        let entrant = |name: &'static str| Entrant {
            name: name.to_owned(),
            attempt: Box::new(|| {
                order.borrow_mut().push_str(name);
                Ok(Trial::default())
            }),
        };
        let records = measure(&[entrant("a"), entrant("b")], 2, |_| order.borrow_mut().push('|'));
        assert_eq!(order.borrow().as_str(), "abba|ab|ba");
        assert_eq!(records[0].to_end().summary().unwrap().n, 2);
    }

    #[test]
    fn one_that_always_fails_is_given_up_and_told() {
        let entrants = [
            Entrant { name: "bad".to_owned(), attempt: Box::new(|| bail!("no such thing")) },
            Entrant { name: "good".to_owned(), attempt: Box::new(|| Ok(trial(&[], 5))) },
        ];
        let records = measure(&entrants, 10, |_| ());
        let row = records[0].row(&records[0].to_end());
        assert_eq!((row.failed, row.failure.as_deref()), (HOPELESS, Some("no such thing")));
        assert_eq!(records[1].to_end().summary().unwrap().n, 10);
    }

    #[test]
    fn steps_are_measured_within_one_trial() {
        let trials = vec![trial(&[("a", 10), ("b", 15)], 20), trial(&[("a", 100)], 200)];
        let record = Record { trials, ..Record::default() };
        assert_eq!(median(&record.to_mark("a")), Some(10));
        assert_eq!(median(&record.between("a", "b")), Some(5));
        assert_eq!(median(&record.to_mark("c")), None);
        assert_eq!(record.marks(), ["a", "b"]);
        let names: Vec<_> = record.ladder().into_iter().map(|row| row.name).collect();
        assert_eq!(names, ["a", "b", "end of the process"]);
    }
}
