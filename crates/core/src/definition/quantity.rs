//! CPU and memory quantities in the notation of Kubernetes.

use std::{fmt, str::FromStr};

use schemars::{Schema, json_schema};
use serde_with::{DeserializeFromStr, SerializeDisplay};

use super::{ParseError, text_schema};

/// CPUs in thousandths. Default: 1 CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, DeserializeFromStr, SerializeDisplay)]
pub struct Cpus(u64);

/// Memory in bytes. Default: 1 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, DeserializeFromStr, SerializeDisplay)]
pub struct Memory(u64);

impl Cpus {
    /// Creates a quantity from thousandths of a CPU.
    pub const fn from_thousandths(thousandths: u64) -> Self {
        Self(thousandths)
    }

    /// Returns the quantity in thousandths of a CPU.
    pub const fn thousandths(self) -> u64 {
        self.0
    }
}

impl Memory {
    /// Creates a quantity from bytes.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Returns the quantity in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl Default for Cpus {
    fn default() -> Self {
        Self(1000)
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self(1 << 30)
    }
}

impl FromStr for Cpus {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let expected = "a number of processors above zero, as in `2`, `0.5` or `500m`";
        parse_thousandths(text)
            .and_then(|value| u64::try_from(value).ok())
            .map(Self)
            .ok_or_else(|| ParseError::new(text, expected))
    }
}

impl FromStr for Memory {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let expected = "an amount of memory above zero, as in `2Gi`, `1500M` or `1073741824`";
        parse_thousandths(text)
            .and_then(|value| u64::try_from(value.div_ceil(1000)).ok())
            .map(Self)
            .ok_or_else(|| ParseError::new(text, expected))
    }
}

/// Parses a quantity above zero, in thousandths, rounded up. The syntax follows
/// `k8s.io/apimachinery/pkg/api/resource`: a decimal number, then a suffix or an exponent of ten.
fn parse_thousandths(text: &str) -> Option<u128> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = [whole, fraction].concat();
    // A longer number is a mistake, and would overflow.
    if digits.is_empty() || digits.len() > 20 {
        return None;
    }
    let (factor, divisor) = scale(suffix)?;
    let divisor = 10_u128.pow(u32::try_from(fraction.len()).ok()?).checked_mul(divisor)?;
    let value = digits.parse::<u128>().ok()?.checked_mul(factor)?.checked_mul(1000)?.div_ceil(divisor);
    (value > 0).then_some(value)
}

/// Returns the multiplier and the divisor of a suffix.
fn scale(suffix: &str) -> Option<(u128, u128)> {
    // The first unit is `base`, the second is its square, and so on.
    let power = |base: u128, units: &[u8], unit: u8| {
        let index = units.iter().position(|known| *known == unit)?;
        base.checked_pow(u32::try_from(index).ok()? + 1)
    };
    match suffix.as_bytes() {
        [] => Some((1, 1)),
        [unit @ (b'm' | b'u' | b'n')] => Some((1, power(1000, b"mun", *unit)?)),
        [unit] => Some((power(1000, b"kMGTPE", *unit)?, 1)),
        [unit, b'i'] => Some((power(1024, b"KMGTPE", *unit)?, 1)),
        _ => {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            let factor = 10_u128.pow(exponent.unsigned_abs().min(18));
            Some(if exponent < 0 { (1, factor) } else { (factor, 1) })
        }
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_multiple_of(1000) { write!(f, "{}", self.0 / 1000) } else { write!(f, "{}m", self.0) }
    }
}

impl fmt::Display for Memory {
    /// Uses the largest binary unit that divides the quantity.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
        match units.iter().find(|(_, bits)| self.0.trailing_zeros() >= *bits) {
            Some((unit, bits)) => write!(f, "{}{unit}", self.0 >> bits),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Schema of a quantity as Kubernetes writes it. Plain numbers are allowed too, because editors parse `2` as a number.
fn quantity(description: &str) -> Schema {
    let pattern = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?$";
    json_schema!({
        "description": description,
        "anyOf": [{"type": "string", "pattern": pattern}, {"type": "number", "exclusiveMinimum": 0}],
    })
}

text_schema!(Cpus, false, quantity("Number of processors as in Kubernetes: `2`, `500m`; 1 by default."));
text_schema!(Memory, false, quantity("Memory as in Kubernetes: `2Gi`, `1500M`; 1Gi by default."));

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_reads_them() {
        let cpus = [("2", 2000), ("500m", 500), ("0.5", 500), (".25", 250), ("1.", 1000), ("1e1", 10_000)];
        for (text, thousandths) in cpus {
            assert_eq!(text.parse(), Ok(Cpus(thousandths)), "{text}");
        }
        assert_eq!("1u".parse(), Ok(Cpus(1)), "rounded up");
        let memory = [
            ("2Gi", 2 << 30),
            ("1500M", 1_500_000_000),
            ("128974848", 128_974_848),
            ("129e6", 129_000_000),
            ("128974848000m", 128_974_848),
            ("1.5Ki", 1536),
            ("5E-1", 1),
        ];
        for (text, bytes) in memory {
            assert_eq!(text.parse(), Ok(Memory(bytes)), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        let wrong = [
            "",
            "0",
            "0.0",
            "-1",
            "+1",
            "1g",
            "1 Gi",
            "Gi",
            "1.2.3",
            ".",
            "1e",
            "1ei",
            "NaN",
            "٣",
            "1GiB",
            "999999999999999999999",
            "99999999999999999999Ei",
        ];
        for text in wrong {
            assert!(text.parse::<Cpus>().is_err(), "{text:?}");
            assert!(text.parse::<Memory>().is_err(), "{text:?}");
        }
        let told = "2 GB".parse::<Memory>().unwrap_err().to_string();
        assert_eq!(
            told,
            "\"2 GB\" is not an amount of memory above zero, as in `2Gi`, `1500M` or `1073741824`"
        );
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(cpus in 1..u64::MAX / 1000, memory in 1..u64::MAX / 1000) {
            prop_assert_eq!(Cpus(cpus).to_string().parse(), Ok(Cpus(cpus)));
            prop_assert_eq!(Memory(memory).to_string().parse(), Ok(Memory(memory)));
        }

        #[test]
        fn nothing_panics(text in "\\PC{0,24}|[0-9.]{0,22}[a-zA-Z+-]{0,3}[0-9]{0,12}") {
            let _ = (text.parse::<Cpus>(), text.parse::<Memory>());
        }
    }
}
