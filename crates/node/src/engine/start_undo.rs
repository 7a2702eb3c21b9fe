//! Undoes a start that fails: what the daemon keeps on its host on purpose when it ends must not remain if it never ran.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// Steps that undo a start, in the order of the start. Dropped before [`StartUndo::disarm`], it undoes the start.
#[derive(Default)]
pub(super) struct StartUndo {
    steps: Vec<UndoStep>,
}

struct UndoStep {
    subject: String,
    undo: Box<dyn FnOnce() -> io::Result<()>>,
}

impl StartUndo {
    /// Adds a step; `subject` names what the step removes or restores. To be called before the change, so that a change
    /// that fails halfway is undone too.
    pub(super) fn push(
        &mut self,
        subject: impl Into<String>,
        undo: impl FnOnce() -> io::Result<()> + 'static,
    ) {
        self.steps.push(UndoStep {
            subject: subject.into(),
            undo: Box::new(undo),
        });
    }

    /// Ends the start: its changes remain.
    pub(super) fn disarm(mut self) {
        self.steps.clear();
    }
}

impl Drop for StartUndo {
    fn drop(&mut self) {
        for step in self.steps.drain(..).rev() {
            if let Err(error) = (step.undo)() {
                tracing::error!(subject = step.subject, %error, "a failed start cannot be undone completely");
            }
        }
    }
}

/// Files in a directory of pins before a start.
pub(super) struct PinsBefore {
    directory: PathBuf,
    names: Option<BTreeSet<OsString>>,
}

impl PinsBefore {
    /// Lists the files of a directory, which need not exist.
    pub(super) fn list(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            names: file_names(directory).ok(),
        }
    }

    /// Removes the files that were not there before, and a directory that was not there.
    pub(super) fn remove_others(&self) -> io::Result<()> {
        let none = BTreeSet::new();
        let kept = self.names.as_ref().unwrap_or(&none);
        let present = match file_names(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            names => names?,
        };
        for name in present.difference(kept) {
            std::fs::remove_file(self.directory.join(name))?;
        }
        match self.names {
            Some(_) => Ok(()),
            None => std::fs::remove_dir(&self.directory),
        }
    }
}

fn file_names(directory: &Path) -> io::Result<BTreeSet<OsString>> {
    let files = std::fs::read_dir(directory)?;
    files.map(|file| Ok(file?.file_name())).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    fn undo_of(done: &Rc<RefCell<Vec<u32>>>) -> StartUndo {
        let mut undo = StartUndo::default();
        for number in 1..=3 {
            let done = done.clone();
            undo.push(format!("step {number}"), move || {
                done.borrow_mut().push(number);
                match number {
                    2 => Err(io::Error::other("refused")),
                    _ => Ok(()),
                }
            });
        }
        undo
    }

    #[test]
    fn failed_start_is_undone_from_the_last_step_on() {
        let done = Rc::default();
        drop(undo_of(&done));
        assert_eq!(*done.borrow(), [3, 2, 1], "a step that fails ends nothing");
    }

    #[test]
    fn complete_start_is_not_undone() {
        let done = Rc::default();
        undo_of(&done).disarm();
        assert_eq!(*done.borrow(), [0; 0]);
    }

    #[test]
    fn only_new_pins_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        std::fs::create_dir(&old).unwrap();
        std::fs::write(old.join("flows"), "").unwrap();
        let before = [PinsBefore::list(&old), PinsBefore::list(&new)];
        std::fs::create_dir(&new).unwrap();
        for directory in [&old, &new] {
            std::fs::write(directory.join("link"), "").unwrap();
        }
        for pins in before {
            pins.remove_others().unwrap();
        }
        assert_eq!(file_names(&old).unwrap(), ["flows".into()].into());
        assert!(!new.exists());
    }
}
