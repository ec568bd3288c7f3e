//! What a model thinks, shown dim while it does, and folded to one line when it is done.

use unicode_width::UnicodeWidthChar as _;

use crate::output::{erase_lines, has_style, print_styled};

/// Thoughts on the screen.
pub(super) struct Thoughts {
    /// Columns and rows of the terminal; none without a terminal, and then nothing is shown.
    size: Option<(usize, usize)>,
    /// Where the cursor is, counted from the first thought.
    column: usize,
    rows: usize,
    lines: usize,
    open: bool,
}

impl Thoughts {
    pub(super) fn new(size: Option<(usize, usize)>) -> Thoughts {
        Thoughts { size, column: 0, rows: 0, lines: 0, open: false }
    }

    /// Shows a piece.
    pub(super) fn show(&mut self, text: &str) {
        let Some((columns, _)) = self.size else { return };
        if !std::mem::replace(&mut self.open, true) {
            self.lines = 1;
        }
        for c in text.chars() {
            let width = if c == '\t' { 8 - self.column % 8 } else { c.width().unwrap_or(1) };
            if c == '\n' {
                (self.column, self.rows, self.lines) = (0, self.rows + 1, self.lines + 1);
            } else if self.column + width > columns {
                (self.column, self.rows) = (width, self.rows + 1);
            } else {
                self.column += width;
            }
        }
        print_styled(text, "2");
    }

    /// The thoughts are over: they make room for a line that counts them. What has left the screen already stays.
    pub(super) fn fold(&mut self) {
        let Some((_, rows)) = self.size.filter(|_| std::mem::take(&mut self.open)) else { return };
        if has_style() && self.rows + 1 < rows {
            erase_lines(self.rows);
        } else {
            print_styled("\n", "2");
        }
        let lines = if self.lines == 1 { "1 line".to_owned() } else { format!("{} lines", self.lines) };
        print_styled(&format!("(thought {lines}; /thoughts shows what)\n\n"), "2");
        (self.column, self.rows, self.lines) = (0, 0, 0);
    }
}
