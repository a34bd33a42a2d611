//! Parses `Module.symvers`, which lists the symbols that a kernel or driver exports, with their versions.

use std::collections::HashMap;

/// Maximum number of rows of a table. Distribution kernels export about 30,000 symbols.
const MAX_ROWS: usize = 1_000_000;
/// Maximum number of exporters, and of namespaces, of a table. Distribution kernels have about 4,000 modules.
const MAX_EXPORTERS: usize = 65_536;
/// Maximum length of a symbol's name in bytes (`KSYM_NAME_LEN` in the kernel's `include/linux/kallsyms.h`).
const MAX_NAME: usize = 512;

/// A `Module.symvers`: exported symbols by name. All names share one string and a row has 20 bytes, because farrier
/// holds one table for each kernel and needed image.
#[derive(Clone, Debug, Default)]
pub struct SymbolTable {
    /// All names, concatenated.
    names: String,
    /// Rows, sorted by name.
    rows: Vec<Row>,
    /// Exporting modules as written in the table: `vmlinux`, `drivers/infiniband/core/ib_core`.
    modules: Vec<Box<str>>,
    /// Namespaces that symbols are exported to.
    namespaces: Vec<Box<str>>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    crc: u32,
    start: u32,
    length: u16,
    gpl_only: bool,
    module: u32,
    /// Index plus one; 0 for none.
    namespace: u32,
}

/// An exported symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportedSymbol<'a> {
    /// Name of the symbol.
    pub name: &'a str,
    /// Symbol version (CRC); 0 if the kernel was built without symbol versions.
    pub crc: u32,
    /// Exporter: `vmlinux`, or a module's path without its extension.
    pub module: &'a str,
    /// Whether the symbol is exported with `EXPORT_SYMBOL_GPL`.
    pub gpl_only: bool,
    /// Namespace that users of the symbol must import.
    pub namespace: Option<&'a str>,
}

/// Reason why a text is not a symbol table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SymbolTableError {
    /// A line does not have the table's columns. Holds the line's number and the problem.
    #[error("line {0} of the symbol table {1}")]
    Line(usize, &'static str),
    /// The table is larger than any kernel's.
    #[error("the symbol table has more than {MAX_ROWS} lines, {MAX_EXPORTERS} exporters or 4 GiB of names")]
    Size,
}

impl ExportedSymbol<'_> {
    /// Name of the exporter as `lsmod` shows it: `ib_core` for `drivers/infiniband/core/ib_core`.
    pub fn module_name(&self) -> String {
        super::module_name(self.module)
    }
}

impl SymbolTable {
    /// Parses a table of any kernel since 2.6: tab-separated `crc name module [export [namespace]]`. Linux 5.4 and 5.5
    /// first shipped with the namespace as third column (moved to the end by commit 5190044c2965). Of a duplicate
    /// symbol the first row counts.
    ///
    /// Memory: during parsing at most 24 times the text, and at most 192 MiB beyond its length; afterwards at most
    /// eight times the text.
    pub fn parse(text: &str) -> Result<Self, SymbolTableError> {
        let mut table = Self { names: String::with_capacity(text.len() / 2), ..Self::default() };
        table.rows.reserve(text.len() / 64);
        let (mut modules, mut namespaces) = (HashMap::new(), HashMap::new());
        for (index, line) in text.lines().enumerate() {
            if line.is_empty() {
                continue;
            }
            let symbol = parse_row(line).map_err(|reason| SymbolTableError::Line(index + 1, reason))?;
            let start = u32::try_from(table.names.len()).map_err(|_| SymbolTableError::Size)?;
            let length = u16::try_from(symbol.name.len()).map_err(|_| SymbolTableError::Size)?;
            if table.rows.len() == MAX_ROWS {
                return Err(SymbolTableError::Size);
            }
            table.names.push_str(symbol.name);
            table.rows.push(Row {
                crc: symbol.crc,
                start,
                length,
                gpl_only: symbol.gpl_only,
                module: intern(symbol.module, &mut modules, &mut table.modules)?,
                namespace: match symbol.namespace {
                    None => 0,
                    Some(namespace) => intern(namespace, &mut namespaces, &mut table.namespaces)? + 1,
                },
            });
        }
        table.rows = sorted(&table.names, &table.rows);
        let Self { names, rows, .. } = &mut table;
        names.shrink_to_fit();
        rows.shrink_to_fit();
        Ok(table)
    }

    /// Returns the symbol of this name.
    pub fn get(&self, name: &str) -> Option<ExportedSymbol<'_>> {
        let index = self.rows.binary_search_by(|row| name_of(&self.names, row).cmp(name)).ok()?;
        self.rows.get(index).map(|row| self.symbol(row))
    }

    /// Iterates over all symbols, sorted by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = ExportedSymbol<'_>> {
        self.rows.iter().map(|row| self.symbol(row))
    }

    /// Number of symbols.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether the table has no symbols.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// All modules that export a symbol, as written in the table.
    pub fn exporters(&self) -> impl Iterator<Item = &str> {
        self.modules.iter().map(AsRef::as_ref)
    }

    fn symbol(&self, row: &Row) -> ExportedSymbol<'_> {
        ExportedSymbol {
            name: name_of(&self.names, row),
            crc: row.crc,
            module: self.modules.get(row.module as usize).map_or("", AsRef::as_ref),
            gpl_only: row.gpl_only,
            namespace: (row.namespace as usize)
                .checked_sub(1)
                .and_then(|index| self.namespaces.get(index))
                .map(AsRef::as_ref),
        }
    }
}

/// Sorts rows by name, and keeps the first of duplicates. The first 16 bytes decide most comparisons; comparing
/// complete names each time takes three times as long.
fn sorted(names: &str, rows: &[Row]) -> Vec<Row> {
    let mut keys: Vec<(u128, usize)> =
        rows.iter().enumerate().map(|(index, row)| (prefix(name_of(names, row)), index)).collect();
    let name = |index: usize| rows.get(index).map(|row| name_of(names, row));
    keys.sort_unstable_by(|&(prefix_a, a), &(prefix_b, b)| {
        prefix_a.cmp(&prefix_b).then_with(|| name(a).cmp(&name(b))).then(a.cmp(&b))
    });
    keys.dedup_by(|&mut (prefix_a, a), &mut (prefix_b, b)| prefix_a == prefix_b && name(a) == name(b));
    keys.into_iter().filter_map(|(_, index)| rows.get(index).copied()).collect()
}

fn prefix(name: &str) -> u128 {
    let mut key = [0; 16];
    for (slot, byte) in key.iter_mut().zip(name.bytes()) {
        *slot = byte;
    }
    u128::from_be_bytes(key)
}

fn name_of<'a>(names: &'a str, row: &Row) -> &'a str {
    let start = row.start as usize;
    names.get(start..start + usize::from(row.length)).unwrap_or("")
}

fn intern<'t>(
    text: &'t str,
    indexes: &mut HashMap<&'t str, u32>,
    list: &mut Vec<Box<str>>,
) -> Result<u32, SymbolTableError> {
    // Rows of one exporter are mostly adjacent.
    if let Some(last) = list.len().checked_sub(1).filter(|&last| list.get(last).is_some_and(|l| **l == *text))
    {
        return u32::try_from(last).map_err(|_| SymbolTableError::Size);
    }
    if let Some(&index) = indexes.get(text) {
        return Ok(index);
    }
    if list.len() == MAX_EXPORTERS {
        return Err(SymbolTableError::Size);
    }
    let index = u32::try_from(list.len()).map_err(|_| SymbolTableError::Size)?;
    list.push(text.into());
    indexes.insert(text, index);
    Ok(index)
}

fn parse_row(line: &str) -> Result<ExportedSymbol<'_>, &'static str> {
    let mut fields = line.split('\t');
    let crc = fields
        .next()
        .and_then(|field| field.strip_prefix("0x"))
        .filter(|digits| digits.len() <= 8 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
        .and_then(|digits| u32::from_str_radix(digits, 16).ok())
        .ok_or("does not start with a version such as 0x1234abcd")?;
    let name = fields.next().filter(|name| !name.is_empty()).ok_or("names no symbol")?;
    if name.len() > MAX_NAME || name.bytes().any(|b| b.is_ascii_whitespace() || b.is_ascii_control()) {
        return Err("names no possible symbol");
    }
    let third = fields.next().ok_or("names no exporter")?;
    let fourth = fields.next();
    let fifth = fields.next();
    if fields.next().is_some() {
        return Err("has more than five columns");
    }
    let (module, export, namespace) = match (fourth, fifth) {
        (None, _) => (third, "EXPORT_SYMBOL", ""),
        (Some(fourth), Some(export)) if is_export(export) && !is_export(fourth) => (fourth, export, third),
        (Some(export), namespace) => (third, export, namespace.unwrap_or("")),
    };
    if module.is_empty() {
        return Err("names no exporter");
    }
    if !is_export(export) {
        return Err("has no column of the form EXPORT_SYMBOL or EXPORT_SYMBOL_GPL");
    }
    Ok(ExportedSymbol {
        name,
        crc,
        module,
        // `EXPORT_SYMBOL_GPL_FUTURE` (until 5.9) still allowed every module to use the symbol, with a warning.
        gpl_only: export.ends_with("_GPL"),
        namespace: Some(namespace.trim()).filter(|namespace| !namespace.is_empty()),
    })
}

/// Whether the field is `EXPORT_SYMBOL` or `EXPORT_SYMBOL_GPL`; until 5.9 also `EXPORT_SYMBOL_GPL_FUTURE` and
/// `EXPORT_UNUSED_SYMBOL[_GPL]`.
fn is_export(field: &str) -> bool {
    matches!(
        field,
        "EXPORT_SYMBOL"
            | "EXPORT_SYMBOL_GPL"
            | "EXPORT_SYMBOL_GPL_FUTURE"
            | "EXPORT_UNUSED_SYMBOL"
            | "EXPORT_UNUSED_SYMBOL_GPL"
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_every_order_of_columns() {
        let table = SymbolTable::parse(
            "0x4c9d28b0\tphys_base\tvmlinux\tEXPORT_SYMBOL\t\n\
             0x00000001\tnow\tdrivers/cxl/core/cxl_core\tEXPORT_SYMBOL_GPL\tCXL\n\
             0x00000002\tolder\tUSB_STORAGE\tdrivers/usb/storage/usb-storage\tEXPORT_SYMBOL_GPL\n\
             0x00000003\tolder_plain\t\tvmlinux\tEXPORT_SYMBOL\n\
             0x00000004\tfour\tvmlinux\tEXPORT_SYMBOL_GPL_FUTURE\n\
             0x00000005\tthree\tvmlinux\n",
        )
        .unwrap();
        assert_eq!(table.len(), 6);
        let now = table.get("now").unwrap();
        assert_eq!((now.crc, now.gpl_only, now.namespace), (1, true, Some("CXL")));
        assert_eq!(now.module_name(), "cxl_core");
        let older = table.get("older").unwrap();
        assert_eq!(
            (older.module, older.module_name().as_str(), older.namespace),
            ("drivers/usb/storage/usb-storage", "usb_storage", Some("USB_STORAGE"))
        );
        assert_eq!(table.get("older_plain").unwrap().namespace, None);
        assert!(!table.get("four").unwrap().gpl_only);
        assert_eq!(table.get("three").unwrap().module, "vmlinux");
        assert_eq!(table.get("absent"), None);
        assert_eq!(table.get(""), None);
    }

    #[test]
    fn the_first_of_two_counts() {
        let table =
            SymbolTable::parse("0x2\ta\tvmlinux\tEXPORT_SYMBOL\t\n0x1\ta\tm\tEXPORT_SYMBOL\t\n").unwrap();
        assert_eq!(table.get("a").unwrap().crc, 2);
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn names_the_line_that_is_wrong() {
        let reason = |text: &str| SymbolTable::parse(text).unwrap_err().to_string();
        assert_eq!(
            reason("0x1\ta\tvmlinux\tEXPORT_SYMBOL\nversion https://git-lfs"),
            "line 2 of the symbol table does not start with a version such as 0x1234abcd"
        );
        assert_eq!(reason("0x123456789\ta\tb\tEXPORT_SYMBOL"), reason("0x+1\ta\tb\tEXPORT_SYMBOL"));
        assert_eq!(reason("0x1"), "line 1 of the symbol table names no symbol");
        assert_eq!(
            reason("0x1\ta b\tvmlinux\tEXPORT_SYMBOL"),
            "line 1 of the symbol table names no possible symbol"
        );
        assert_eq!(reason("0x1\ta"), "line 1 of the symbol table names no exporter");
        assert_eq!(reason("0x1\ta\t\tEXPORT_SYMBOL"), "line 1 of the symbol table names no exporter");
        assert_eq!(
            reason("0x1\ta\tvmlinux\tsomething"),
            "line 1 of the symbol table has no column of the form EXPORT_SYMBOL or EXPORT_SYMBOL_GPL"
        );
        assert_eq!(
            reason("0x1\ta\tb\tEXPORT_SYMBOL\tn\tx"),
            "line 1 of the symbol table has more than five columns"
        );
        assert!(SymbolTable::parse(&format!("0x1\t{}\tvmlinux\tEXPORT_SYMBOL", "a".repeat(70_000))).is_err());
    }

    #[test]
    fn the_number_of_rows_and_exporters_is_limited() {
        let rows = "0x1\ta\tb\n".repeat(MAX_ROWS + 1);
        assert_eq!(SymbolTable::parse(&rows).unwrap_err(), SymbolTableError::Size);
        let exporters: Vec<String> =
            (0..=MAX_EXPORTERS).map(|number| format!("0x1\ta\t{number}\n")).collect();
        assert_eq!(SymbolTable::parse(&exporters.concat()).unwrap_err(), SymbolTableError::Size);
    }

    #[test]
    fn an_empty_table_is_a_table() {
        assert!(SymbolTable::parse("").unwrap().is_empty());
    }

    proptest! {
        #[test]
        fn never_panics(text in "[0x\\ta-f\\n\\PC]{0,200}") {
            let _ = SymbolTable::parse(&text);
        }

        #[test]
        fn finds_what_was_written(
            rows in prop::collection::btree_map("[a-z_]{1,12}", (any::<u32>(), "[a-z/]{1,8}", any::<bool>(), "[A-Z]{0,4}"), 0..40)
        ) {
            let lines: Vec<String> = rows.iter().rev().map(|(name, (crc, module, gpl, namespace))| {
                let gpl = if *gpl { "_GPL" } else { "" };
                format!("0x{crc:08x}\t{name}\t{module}\tEXPORT_SYMBOL{gpl}\t{namespace}\n")
            }).collect();
            let table = SymbolTable::parse(&lines.concat()).unwrap();
            prop_assert_eq!(table.iter().count(), rows.len());
            for (name, (crc, module, gpl_only, namespace)) in &rows {
                let namespace = Some(namespace.as_str()).filter(|n| !n.is_empty());
                prop_assert_eq!(
                    table.get(name),
                    Some(ExportedSymbol { name, crc: *crc, module, gpl_only: *gpl_only, namespace })
                );
            }
        }
    }
}
