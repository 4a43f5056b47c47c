"""Pages about runs: no script, nothing from elsewhere, readable on a phone, in the dark and on paper.

gather      all that a page shows of a run, read once
server      all runs of a folder on loopback
overview    the page that lists them
document    the report of one run, or of several side by side, as one HTML file
sections    its parts, as markup
chart       lines, bands and bars as inline SVG, with labels in HTML
series      many points as few: the least and the greatest of each pixel
shell       what stands around every page
style       the style sheet
markup      elements; text is always escaped
"""
