//! Reads the report of the virtual machine. Any program in the machine can write to the serial port, so its text is
//! untrusted. Only lines with the key's authentication code are accepted, each once and in order.

use driver_entrypoint::report::{Key, MAX_LINE, Record};

/// Maximum number of records to keep. A check of 4,000 modules produces 20,000 records.
const MAX_RECORDS: usize = 100_000;

/// Records received so far.
#[derive(Debug)]
pub struct Transcript {
    key: Key,
    records: Vec<Record>,
    /// Lowest number that the next record may have.
    next: u64,
    /// An incomplete line.
    partial: Vec<u8>,
    /// Whether the current line is too long for a record and is being skipped.
    skipping: bool,
}

impl Transcript {
    /// Creates an empty transcript.
    pub fn new(key: Key) -> Self {
        Self { key, records: Vec::new(), next: 0, partial: Vec::new(), skipping: false }
    }

    /// Adds output. Returns whether the output completed a record.
    pub fn push(&mut self, bytes: &[u8]) -> bool {
        let before = self.records.len();
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (text, ends) = part.strip_suffix(b"\n").map_or((part, false), |text| (text, true));
            if self.partial.len() + text.len() > MAX_LINE {
                self.partial.clear();
                self.skipping = true;
            }
            if !self.skipping {
                self.partial.extend_from_slice(text);
            }
            if ends {
                let line = std::mem::take(&mut self.partial);
                if !std::mem::take(&mut self.skipping) {
                    self.add_line(&line);
                }
            }
        }
        self.records.len() > before
    }

    fn add_line(&mut self, line: &[u8]) {
        if self.records.len() >= MAX_RECORDS {
            return;
        }
        let Some((number, record)) = Record::parse(line, &self.key) else { return };
        // A lower number means a repeated line.
        if let (true, Some(next)) = (number >= self.next, number.checked_add(1)) {
            self.next = next;
            self.records.push(record);
        }
    }

    /// Records in the order of their numbers.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Release of the kernel, once its init process has reported.
    pub fn kernel(&self) -> Option<&str> {
        self.records.iter().find_map(|record| match record {
            Record::Hello { kernel, .. } => Some(kernel.as_str()),
            _ => None,
        })
    }

    /// Whether the last record has arrived.
    pub fn ended(&self) -> bool {
        matches!(self.records.last(), Some(Record::End(_)))
    }

    /// Whether every record from number 0 to the latest has arrived.
    pub fn is_complete(&self) -> bool {
        self.next == self.records.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEY: Key = Key([7; 16]);

    fn hello(number: u64) -> String {
        Record::Hello { version: "1".into(), kernel: "6.1.0".into() }.line(&KEY, number)
    }

    fn end(number: u64) -> String {
        Record::End(number).line(&KEY, number)
    }

    fn parse(bytes: &[u8], key: Key) -> Transcript {
        let mut transcript = Transcript::new(key);
        transcript.push(bytes);
        transcript
    }

    #[test]
    fn records_are_found_among_other_text() {
        let text = format!("SeaBIOS\r\n[ 1.0] m: {}\n{}garbage\n{}", end(1).trim_end(), hello(0), end(1));
        let transcript = parse(text.as_bytes(), KEY);
        assert_eq!(transcript.records().len(), 2);
        assert_eq!(transcript.kernel(), Some("6.1.0"));
        assert!(transcript.ended() && transcript.is_complete());
    }

    #[test]
    fn repeated_and_forged_records_are_ignored() {
        let forged = Record::End(1).line(&Key([8; 16]), 1);
        let text = format!("{}{}{}", hello(0), hello(0), forged);
        let transcript = parse(text.as_bytes(), KEY);
        assert_eq!(transcript.records().len(), 1);
        assert!(!transcript.ended());
    }

    #[test]
    fn a_lost_record_makes_the_transcript_incomplete() {
        let transcript = parse(format!("{}{}", hello(0), end(2)).as_bytes(), KEY);
        assert!(transcript.ended() && !transcript.is_complete());
    }

    #[test]
    fn an_endless_line_is_skipped() {
        let mut transcript = Transcript::new(KEY);
        for _ in 0..100 {
            transcript.push(&vec![b'x'; 64 << 10]);
            assert!(transcript.partial.len() <= MAX_LINE);
        }
        transcript.push(format!("\n{}", hello(0)).as_bytes());
        assert_eq!(transcript.records().len(), 1);
    }

    proptest! {
        #[test]
        fn records_do_not_depend_on_the_chunk_size(size in 1_usize..200, noise in any::<Vec<u8>>()) {
            let mut text = noise;
            text.extend(format!("\n{}x\n{}", hello(0), end(1)).into_bytes());
            let whole = parse(&text, KEY);
            let mut parts = Transcript::new(KEY);
            for part in text.chunks(size) {
                parts.push(part);
            }
            prop_assert_eq!(whole.records(), parts.records());
            prop_assert_eq!(whole.records().len(), 2);
        }
    }
}
