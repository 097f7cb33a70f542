//! The kernel's command line.

use std::fs;

/// The settings on it.
#[derive(Debug, Default)]
pub struct Cmdline(Vec<(String, String)>);

impl Cmdline {
    /// This boot's. Empty if there is no `/proc`.
    pub fn read() -> Self {
        Self::parse(&fs::read_to_string("/proc/cmdline").unwrap_or_default())
    }

    /// `NAME=VALUE` words; quotes hold a word together, as the kernel has it.
    fn parse(line: &str) -> Self {
        let mut quoted = false;
        let words = line.split(|c: char| {
            quoted ^= c == '"';
            c.is_whitespace() && !quoted
        });
        let settings = words.filter_map(|word| {
            let word = word.replace('"', "");
            let (name, value) = word.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        });
        Self(settings.collect())
    }

    /// The value of `name`; the last counts, and an empty one does not.
    pub fn get(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().rev().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str()).filter(|value| !value.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_counts() {
        let cmdline = Cmdline::parse("quiet cube.root=/dev/vda a=1 cube.root=/dev/vdb\n");
        assert_eq!(cmdline.get("cube.root"), Some("/dev/vdb"));
        assert_eq!(cmdline.get("quiet"), None);
        assert_eq!(Cmdline::parse("cube.root=").get("cube.root"), None);
    }

    #[test]
    fn quotes_hold_a_word_together() {
        let cmdline = Cmdline::parse(r#"a="x y=z" "b=1 2" c=3"#);
        let got = ["a", "b", "c"].map(|name| cmdline.get(name).unwrap());
        assert_eq!(got, ["x y=z", "1 2", "3"]);
    }
}
