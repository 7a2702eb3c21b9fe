//! Kernel settings by path, such as `net/ipv4/ip_forward`. Settings under `net` belong to the calling thread's network
//! namespace.

use std::io;
use std::path::PathBuf;

/// Reads a kernel setting below `/proc/sys`, without the newline.
///
/// # Errors
/// `InvalidInput` for a path that leaves `/proc/sys`; otherwise errors of reading the file.
pub fn read(path: &str) -> io::Result<String> {
    Ok(std::fs::read_to_string(setting_path(path)?)?
        .trim_end()
        .to_owned())
}

/// Writes a kernel setting below `/proc/sys`.
///
/// # Errors
/// `InvalidInput` for a path that leaves `/proc/sys`; otherwise errors of writing the file.
pub fn write(path: &str, value: &str) -> io::Result<()> {
    std::fs::write(setting_path(path)?, value)
}

fn setting_path(path: &str) -> io::Result<PathBuf> {
    if path.is_empty() || path.starts_with('/') || path.split('/').any(|part| part == "..") {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("'{path}' is not a path below /proc/sys"),
        ));
    }
    Ok(PathBuf::from("/proc/sys").join(path))
}

#[cfg(test)]
mod tests {
    #[test]
    fn settings_are_read_and_outside_paths_refused() {
        assert_eq!(super::read("kernel/ostype").expect("readable"), "Linux");
        assert!(super::read("../version").is_err());
        assert!(super::write("/etc/hostname", "x").is_err());
        assert!(super::read("no/such/setting").is_err());
    }
}
